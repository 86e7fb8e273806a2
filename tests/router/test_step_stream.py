"""All calls to a worker over its step stream and its bulk stream: what breaks them, and what a worker may say in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc.aio
import pytest

from pdserve.common.errors import Draining, WrongWorker
from pdserve.common.net.rpc import make_channel
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.request.wire.step_wire import MAX_COMMANDS, MAX_SUBMISSIONS, StepEvent, StepTokens, step_outputs
from pdserve.router.attempts import worker_calls
from pdserve.router.workers import announced_identity
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.step_stream import StepStream
from pdserve.v1 import decode_pb2, inference_pb2, request_pb2, step_stream_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.router.fake_worker import ADMITTED, FakeWorker, decode_outputs, forever, play, said
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.signed_channel import signed


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


@pytest.fixture
def used(monkeypatch):
    """Which stream has had which kinds of call."""
    kinds: dict[str, list[str | None]] = {"step": [], "bulk": []}
    submit = StepStream.submit

    def note(stream, submission, listener):
        worker = listener._worker
        kinds["bulk" if stream is worker.bulk_stream else "step"].append(submission.WhichOneof("call"))
        return submit(stream, submission, listener)

    monkeypatch.setattr(StepStream, "submit", note)
    return kinds


@pytest.mark.parametrize("why", ["size", "logprobs of the prompt", "many logprobs"])
async def test_large_requests_and_answers_go_over_the_bulk_stream(cluster, monkeypatch, used, why):
    worker = cluster.worker("decode")
    worker.max_logprobs = 30
    if why == "size":
        monkeypatch.setattr(worker_calls, "MAX_STEP_REQUEST_BYTES", 100)
    await worker.start()
    await cluster.start(prefill=0, decode=0, max_logprobs=30)
    # the worker here sends none, which only the call itself is to show
    large = {"logprobs of the prompt": {"prompt_logprobs": 1}, "many logprobs": {"logprobs": 21}}
    response = await cluster.complete(**large.get(why, {}))
    assert why in large or response.json()["choices"][0]["text"] == said(5)
    # an answer without the log-probabilities that were asked for is the worker's fault: all attempts are made
    num_attempts = 3 if why == "many logprobs" else 1
    assert (used["step"], used["bulk"]) == ([], ["decode"] * num_attempts)


async def test_embeddings_go_over_the_bulk_stream_and_small_requests_do_not(cluster, used):
    await cluster.start()
    await cluster.complete(logprobs=20)
    assert (await cluster.http.post("/v1/embeddings", json={"input": "hey"})).status_code == 200
    assert (set(used["step"]), used["bulk"]) == ({"prefill", "decode"}, ["embed"])


async def test_a_request_that_is_too_large_for_a_worker_ends_no_stream(cluster, monkeypatch):
    monkeypatch.setattr(announced_identity, "LEAST_REQUEST_BYTES", 1)
    worker = cluster.worker("decode")
    worker.max_request_bytes, worker.step_s = 700, 0.02
    await worker.start()
    await cluster.start(prefill=0, decode=0)
    others = [asyncio.create_task(cluster.text()) for _ in range(3)]
    await worker.called(3)
    response = await cluster.complete(prompt="x" * 240, allowed_token_ids=list(range(250)))
    assert (response.status_code, response.json()["error"]["code"]) == (503, "peer_error")
    assert await asyncio.gather(*others) == [said(5)] * 3
    assert len(worker.calls) == 3


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


async def test_a_client_that_does_not_read_holds_up_no_other(cluster):
    await cluster.worker("decode", max_model_len=1 << 20).start()
    await cluster.start(prefill=0, decode=0, max_unread_bytes=1 << 30)
    worker = cluster.of("decode")
    # more than travels unread to a client that takes 64 KiB at a time
    many = [decode_outputs(1 + 20_000 * i, token_ids=[0] * 20_000) for i in range(40)]
    worker.scripts = [play(ADMITTED, decode_outputs(0, "a"), *many, forever)]
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(cluster.addresses[1], narrow) as channel:
        asked = inference_pb2.GenerateRequest(
            text=inference_pb2.TextPrompt(text="slow"),
            sampling=request_pb2.SamplingParams(max_tokens=800_001),
            stream=True,
        )
        call = InferenceServiceStub(channel).Generate(asked)
        await call.read()
        assert await asyncio.gather(*(cluster.text() for _ in range(3))) == [said(5)] * 3
        assert not worker.calls[0].ended.is_set()
        call.cancel()


class Listener:
    """Notes how its call ends."""

    def __init__(self) -> None:
        self.ends: list[CallFailed | None] = []
        self.ended_once = asyncio.Event()

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> None:
        raise AssertionError("no output was sent")

    def event(self, message: bytes) -> None:
        raise AssertionError("no event was sent")

    def ended(self, failure: CallFailed | None) -> None:
        self.ends.append(failure)
        self.ended_once.set()


class Broken(Listener):
    def ended(self, failure: CallFailed | None) -> None:
        raise RuntimeError("a bug")


class Silent:
    """A channel whose calls take all that is written, one message at a time, and answer when they are cancelled."""

    def __init__(self) -> None:
        self.written: list[step_stream_pb2.StepCommands] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self._cancelled = asyncio.Event()

    def stream_stream(self, method: object, first: bytes) -> Silent:
        return self

    async def write(self, raw: bytes) -> None:
        await self.takes.wait()
        self.written.append(step_stream_pb2.StepCommands.FromString(raw))
        await asyncio.sleep(0)

    async def read(self) -> object:
        await self._cancelled.wait()
        return grpc.aio.EOF

    def cancel(self) -> None:
        self._cancelled.set()


def small(request: bytes = b"x") -> step_stream_pb2.Submission:
    return step_stream_pb2.Submission(request=request, decode=decode_pb2.Decode())


async def test_commands_that_wait_leave_in_messages_that_a_worker_takes():
    channel, count = Silent(), 3 * MAX_COMMANDS
    stream = StepStream(cast(ServiceChannel, channel), "w")
    calls = [stream.submit(small(), Listener()) for _ in range(count)]
    await eventually(lambda: sum(len(each.submissions) for each in channel.written) == count)
    channel.takes.clear()
    for call in calls:
        call.end_sequence(0)
        call.cancel()
        call.cancel()
    late = stream.submit(small(b"late"), Listener())
    dropped = stream.submit(small(b"dropped"), Listener())
    dropped.cancel()
    channel.takes.set()
    await eventually(lambda: sum(len(each.cancelled) for each in channel.written) == count)
    for each in channel.written:
        assert max(len(each.cancelled), len(each.ended_sequences)) <= MAX_COMMANDS
        assert len(each.submissions) <= MAX_SUBMISSIONS
    assert sorted(key for each in channel.written for key in each.cancelled) == list(range(1, count + 1))
    assert [each.key for message in channel.written for each in message.ended_sequences] == list(range(1, count + 1))
    sent = [each for message in channel.written for each in message.submissions]
    assert [each.key for each in sent] == list(range(1, count + 2))
    assert sent[-1].request == b"late"
    late.cancel()
    stream.close()


async def test_a_large_submission_travels_without_others_and_turns_follow_the_begin_of_their_session():
    channel, large = Silent(), bytes(1 << 20)
    stream = StepStream(cast(ServiceChannel, channel), "w")
    session = stream.submit(small(), Listener())
    session.send_turn(b"turn")
    for request in (b"x", large, large, b"y"):
        stream.submit(small(request), Listener())
    await eventually(lambda: sum(len(each.submissions) for each in channel.written) == 5)
    sizes = [[len(each.request) for each in message.submissions] for message in channel.written if message.submissions]
    assert sizes == [[1, 1], [1 << 20], [1 << 20], [1]]
    assert [turn.request for turn in channel.written[-1].turns] == [b"turn"]
    stream.close()


async def test_a_call_that_cannot_be_ended_keeps_no_other_from_its_end(caplog):
    stream, others = StepStream(cast(ServiceChannel, Silent()), "w"), [Listener(), Listener()]
    for listener in (others[0], Broken(), others[1]):
        stream.submit(small(), listener)
    stream.close()
    stream.close()
    assert [len(other.ends) for other in others] == [1, 1]
    assert "could not be ended" in caplog.text


async def test_a_stream_to_an_earlier_life_of_a_worker_ends_its_calls_which_it_never_admitted(cluster):
    worker = await cluster.worker("decode").start()
    async with make_channel(worker.address) as channel:
        stream = StepStream(signed(channel, (worker.worker_id, worker.epoch - 1)), "w")
        listener = Listener()
        stream.submit(small(), listener)
        await asyncio.wait_for(listener.ended_once.wait(), HANG_S)
        [failure] = listener.ends
        assert failure is not None
        assert isinstance(failure.error, WrongWorker)
        assert not failure.is_answer


async def test_requests_go_on_when_a_worker_comes_back_in_another_life_at_its_address(cluster):
    worker = cluster.worker("decode")
    streams = watched(worker)
    worker.scripts = [play(ADMITTED, decode_outputs(0, "a"), decode_outputs(1, "b"), forever)]
    await worker.start()
    await cluster.start(prefill=0, decode=0)
    asked = asyncio.create_task(cluster.text())
    await worker.called()
    epoch = worker.epoch
    await worker.kill()
    await worker.start()
    assert await asked == said(5)
    assert worker.epoch == epoch + 1
    assert streams.count("Open") == 2


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
