"""Workers whose engine has a process of its own: a request through both, and the death of a process in the middle of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import WorkerLost
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.client import process_client
from pdserve.engine.client.process_client import ProcessClient
from pdserve.v1 import prefill_pb2
from pdserve.worker.worker import Worker
from tests.support.engine.forked_engine import start_forked
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.worker_call import Kind, WorkerCall
from tests.support.transfers.worker_pair import KEY, Pair, calls, decode_call, generation_request, running_pair

DEATH_S = 10.0
"""Twice what a process's death may take to be told."""


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "start_program", start_forked)


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    async with running_pair(
        tiny_checkpoints("llama"), KEY, num_blocks=64, max_model_len=512, engine_process=True
    ) as made:
        yield made


def process_client_of(worker: Worker) -> ProcessClient:
    assert isinstance(worker.core, ProcessClient)
    return worker.core


async def events_of(call: WorkerCall) -> list[Any]:
    return [event async for event in call]


async def tokens_of(pair: Pair, request: GenerationRequest, *, remote: bool) -> dict[int, list[int]]:
    """Sequence -> tokens. remote: prefilled at P, else at D."""
    tokens: dict[int, list[int]] = {}
    if remote:
        prefill, decode = calls(pair, request)
        events, received = await asyncio.gather(events_of(prefill), events_of(decode))
        assert [event.WhichOneof("event") for event in events] == ["admitted", "computed", "ended"]
        assert events[-1].ended.how == prefill_pb2.Ended.RELEASED
        for outputs in events[1].computed.first_outputs:
            tokens[outputs.index] = list(outputs.token_ids)
    else:
        received = await events_of(decode_call(pair, request, prefill_here=True))
    landed = []
    for event in received:
        if event.HasField("outputs"):
            had = tokens.setdefault(event.outputs.index, [])
            assert event.outputs.first_position == len(had)
            had += event.outputs.token_ids
        elif event.HasField("landed"):
            landed.append(event.landed)
    if remote:
        assert [(each.num_blocks, each.connector) for each in landed] == [(3, "tcp")]
        assert landed[0].transfer_bytes == 3 * pair.d.identity.layout.shapes[0].block_bytes
    return tokens


async def at_rest(pair: Pair) -> None:
    """No block is in use in either pool, and no transfer is open."""
    for worker in (pair.p, pair.d):
        engine = worker.engine

        def rests(engine: Any = engine) -> bool:
            return not (engine.stats.num_blocks_in_use or engine.transfer_counts.num_open or engine.num_waiting)

        await eventually(rests)
        stats = engine.stats
        assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total


async def test_i1_a_request_through_two_processes_has_the_tokens_of_one(pair: Pair) -> None:
    async with asyncio.timeout(HANG_S):
        for first, params in (
            (3, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)),
            (103, SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, ignore_eos=True, logprobs=2)),
        ):
            prompt = list(range(first, first + 40))
            remote = await tokens_of(
                pair, generation_request(pair.d, prompt, n=params.n, sampling_params=params), remote=True
            )
            assert [len(tokens) for tokens in remote.values()] == [params.max_tokens] * params.n
            local = generation_request(pair.d, prompt, n=params.n, sampling_params=params)
            assert await tokens_of(pair, local, remote=False) == remote
        await at_rest(pair)
        p, d = pair.p.identity, pair.d.identity
        for worker in (p, d):
            assert worker.attach_address != worker.address, "control streams go to the process that has the pool"
        page = await pair.p.engine.transfers()
        assert [(view.state, view.num_blocks_landed) for view in page.ended] == [("RELEASED", 3)] * 2
        assert all(worker.health().ok for worker in (pair.p, pair.d))


@pytest.mark.few(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_i6_the_death_of_a_process_is_told_to_every_call(pair: Pair, role: Kind) -> None:
    victim, other = (pair.p, pair.d) if role == "prefill" else (pair.d, pair.p)
    process = process_client_of(victim).process_id
    async with asyncio.timeout(HANG_S):
        os.kill(process, signal.SIGSTOP)  # so that every call is open when it dies
        prefill, decode = calls(pair, generation_request(pair.d))
        local = WorkerCall(pair.service(victim), role, generation_request(victim))
        for call in (prefill, decode, local):
            await call.read()
        began = time.monotonic()
        os.kill(process, signal.SIGKILL)
        assert await (prefill if role == "prefill" else decode).code() == "worker_lost"
        assert await local.code() == "worker_lost"
        if role == "prefill":
            assert await decode.code() == "transfer_failed"
        assert time.monotonic() - began < DEATH_S
        assert victim.engine.died.is_set()
        assert (victim.health().ok, victim.health().status) == (False, "dead")
        with pytest.raises(WorkerLost):
            await victim.engine.transfers()
        late = WorkerCall(pair.service(victim), role, generation_request(victim))
        assert await late.code() == "worker_lost"
        prefill.cancel()
        await eventually(lambda: not other.engine.num_streams and not other.engine.transfer_counts.num_open)
