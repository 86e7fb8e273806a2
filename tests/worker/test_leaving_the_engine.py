"""The result of a released request is told once: by the engine if it cut it short, and also when the engine is dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve.common.request.engine_types import EngineCoreOutput
from pdserve.worker.engine_client import RequestEnd
from tests.support.engine.engine_harness import MakeEngine, harnesses, make_engine  # noqa: F401
from tests.support.run.waiting import HANG_S
from tests.worker.client_harness import ClientHarness, with_client

PROMPT = list(range(22))


@pytest.fixture
async def engine(make_engine: MakeEngine) -> AsyncIterator[ClientHarness]:  # noqa: F811
    async with with_client(make_engine(max_num_batched_tokens=8)) as harness:
        yield harness


class Told:
    """Hears how requests ended."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[RequestEnd] = asyncio.Queue()

    async def next(self) -> RequestEnd:
        return await asyncio.wait_for(self.requests.get(), HANG_S)


async def test_an_aborted_request_is_told_with_its_moments_and_chunks(engine: ClientHarness) -> None:
    told, outputs = Told(), list[EngineCoreOutput]()
    stream = engine.client.submit(engine.request(PROMPT, params={"max_tokens": 500}), outputs.append)
    await asyncio.wait_for(stream.get(), HANG_S)
    engine.client.release(stream, told.requests.put_nowait)
    engine.client.release(stream, told.requests.put_nowait)
    request = (await told.next()).aborted
    assert request is not None
    moments = request.moments
    assert moments["queued"] <= moments["scheduled"] <= moments["first_token"] <= moments["finished"]
    assert [num_tokens for _, num_tokens in request.prefill_chunks] == [8, 8, 6]
    assert [at for at, _ in request.prefill_chunks] == sorted(at for at, _ in request.prefill_chunks)
    assert outputs[0].prefill_chunks == request.prefill_chunks
    assert told.requests.empty()


async def test_a_request_that_had_ended_is_told_as_such(engine: ClientHarness) -> None:
    told = Told()
    stream = engine.client.submit(engine.request(PROMPT, params={"max_tokens": 2}))
    _ = [output async for output in stream]
    engine.client.release(stream, told.requests.put_nowait)
    assert await told.next() == RequestEnd()


async def test_a_dead_engine_keeps_nobody_waiting(engine: ClientHarness) -> None:
    def fail() -> None:
        raise ValueError("a bug in a kernel")

    told = Told()
    engine.model.before_step = fail
    early, late = (engine.client.submit(engine.request([n] * 9)) for n in range(2))
    engine.client.release(early, told.requests.put_nowait)
    await asyncio.wait_for(engine.client.died.wait(), HANG_S)
    engine.client.release(late, told.requests.put_nowait)
    await told.next()
    assert await told.next() == RequestEnd()


async def test_the_age_of_a_tick_is_small_while_the_loop_turns(engine: ClientHarness) -> None:
    async with asyncio.timeout(HANG_S):
        before = engine.client.tick
        while engine.client.tick == before:  # noqa: ASYNC110 - the engine's thread tells nobody
            await asyncio.sleep(0.01)
    assert 0 <= engine.client.tick_age_s < 5
