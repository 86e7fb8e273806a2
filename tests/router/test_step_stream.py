"""All calls to a worker over one stream: what breaks it, and what a worker may say in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from pdserve.common.errors import Draining
from pdserve.common.request.step_wire import StepEvent, StepTokens, step_outputs
from pdserve.router.attempts import worker_calls
from pdserve.v1 import decode_pb2, step_stream_pb2
from tests.router.fake_worker import ADMITTED, FakeWorker, decode_outputs, forever, play, said
from tests.support.waiting import eventually


class Streams(grpc.aio.ServerInterceptor):
    """Counts a worker's calls by method, and answers its step streams in place of the worker, where that is asked for."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.answer: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]] | None = None

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        self.opened.append(method)
        if method != "Open" or self.answer is None:
            return await continuation(handler_call_details)
        answer = self.answer

        async def answered(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for response in answer(requests):
                yield response

        return grpc.stream_stream_rpc_method_handler(answered)

    def count(self, method: str) -> int:
        return self.opened.count(method)


def watched(worker: FakeWorker) -> Streams:
    """Before the worker's start."""
    streams = Streams()
    worker.interceptors.append(streams)
    return streams


async def test_all_requests_share_one_stream_per_worker(cluster):
    streams = [watched(cluster.worker(role)) for role in ("prefill", "decode")]
    for worker in cluster.workers:
        await worker.start()
    await cluster.start(prefill=0, decode=0)
    texts = await asyncio.gather(*(cluster.text(prompt=f"{number}" * 40) for number in range(12)))
    assert texts == [said(5)] * 12
    for each in streams:
        assert each.count("Open") == 1
        assert not each.count("Prefill") + each.count("Generate")


@pytest.mark.parametrize("why", ["setting", "version", "size"])
async def test_calls_with_streams_of_their_own(cluster, monkeypatch, why):
    worker = cluster.worker("decode")
    streams = watched(worker)
    if why == "version":
        worker.step_stream_version = 7
    elif why == "size":
        monkeypatch.setattr(worker_calls, "MAX_SUBMISSION_BYTES", 100)
    await worker.start()
    await cluster.start(prefill=0, decode=0, **({"step_streams": False} if why == "setting" else {}))
    assert await cluster.text() == said(5)
    assert (streams.count("Open"), streams.count("Generate")) == (0, 1)


async def test_a_broken_stream_ends_its_calls_which_go_on_elsewhere(cluster):
    await cluster.start(prefill=0, decode=2)
    one, other = cluster.workers
    for worker in cluster.workers:
        worker.script = play(ADMITTED, decode_outputs(0, "a"), decode_outputs(1, "b"), forever)
    asked = [asyncio.create_task(cluster.text()) for _ in range(6)]
    await asyncio.gather(one.called(), other.called())
    await eventually(lambda: len(one.calls) + len(other.calls) == 6)
    for worker in cluster.workers:
        del worker.script
        worker.script = FakeWorker("decode", "").script
    await one.kill()
    # those at the other worker go on only when it ends them
    await other.called(6)
    await other.kill()
    await asyncio.gather(one.start(), other.start())
    assert await asyncio.gather(*asked) == [said(5)] * 6


async def test_the_stream_is_opened_again_after_it_broke(cluster):
    worker = cluster.worker("decode")
    streams = watched(worker)
    await worker.start()
    await cluster.start(prefill=0, decode=0)
    assert await cluster.text() == said(5)
    await worker.kill()
    await worker.live_on()
    await cluster.live(decode=1)
    assert await cluster.text() == said(5)
    assert streams.count("Open") == 2


async def test_a_call_that_is_refused_leaves_the_others_alone(cluster):
    await cluster.start(prefill=0, decode=2)
    for worker in cluster.workers:
        worker.step_s = 0.01
    cluster.workers[0].scripts = [play(Draining("leaving"))]
    assert await asyncio.gather(*(cluster.text() for _ in range(4))) == [said(5)] * 4


async def test_a_client_that_leaves_cancels_its_call_alone(cluster):
    await cluster.start(prefill=0, decode=1)
    worker = cluster.of("decode")
    worker.scripts = [play(ADMITTED, decode_outputs(0, "a"), forever)]
    leaving = asyncio.create_task(cluster.text(prompt="leaves"))
    await worker.called()
    worker.step_s = 0.01
    staying = asyncio.create_task(cluster.text(prompt="stays"))
    await worker.called(2)
    leaving.cancel()
    await worker.calls[0].cancelled.wait()
    assert await staying == said(5)


def outputs_of(*entries: StepTokens | StepEvent) -> bytes:
    return step_outputs(entries).SerializeToString()


def event(key: int, message: decode_pb2.DecodeEvent) -> StepEvent:
    return StepEvent(key, message.SerializeToString())


LAST = decode_outputs(4, said(1, 4), "length")
ODD_STEPS = {
    "unknown keys": [outputs_of(StepTokens(99, 0, 0, [1]), event(99, ADMITTED), StepEvent(98, is_end=True))],
    "an end that comes twice": [outputs_of(StepEvent(99, is_end=True), StepEvent(99, is_end=True))],
    "unknown fields": [b"\xa0\x06\x01"],
    "nothing": [b""],
}
WRONG_STEPS = {
    "garbage": [b"\xff\xff\xff"],
    "columns that do not fit": [step_stream_pb2.StepOutputs(keys=[1, 1], token_ids=[1]).SerializeToString()],
    "events beyond them": [
        step_stream_pb2.StepOutputs(
            events=[step_stream_pb2.CallEvent(key=1, num_before=5, message=b"")]
        ).SerializeToString()
    ],
    "an event of garbage": [outputs_of(StepEvent(1, b"\xff\xff\xff"))],
    "more tokens than were requested": [outputs_of(StepTokens(1, 0, 0, [1] * 100))],
    "a position beyond the end": [outputs_of(StepTokens(1, 0, 2**32 - 1, [1]))],
    "an end before the last token": [outputs_of(StepEvent(1, is_end=True))],
}


@pytest.mark.parametrize("steps", ODD_STEPS.values(), ids=ODD_STEPS)
async def test_what_belongs_to_no_call_is_ignored(cluster, steps):
    worker = cluster.worker("decode")

    async def answer(requests):
        commands = step_stream_pb2.StepCommands.FromString(await anext(requests))
        key = commands.submissions[0].key
        for raw in steps:
            yield raw
        tokens = [decode_outputs(at, said(1, at)) for at in range(4)]
        yield outputs_of(*(event(key, each) for each in (ADMITTED, *tokens, LAST)), StepEvent(key, is_end=True))
        await asyncio.Event().wait()

    watched(worker).answer = answer
    await worker.start()
    await cluster.start(prefill=0, decode=0)
    assert await cluster.text() == said(5)


@pytest.mark.parametrize("steps", WRONG_STEPS.values(), ids=WRONG_STEPS)
async def test_what_is_wrong_ends_the_attempt_which_goes_on_elsewhere(cluster, steps):
    worker = cluster.worker("decode", worker_id="odd")
    asked = 0

    async def answer(requests):
        nonlocal asked
        asked += 1
        await anext(requests)
        for raw in steps:
            yield raw
        await asyncio.Event().wait()

    watched(worker).answer = answer
    await worker.start()
    await cluster.start(prefill=0, decode=1, policy="round_robin")
    for _ in range(2):
        assert await cluster.text() == said(5)
    assert asked
