"""Calls over a router's stream: each ends by itself, and nothing that one of them brings ends another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdserve.common.errors import InvalidRequest, PeerError
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.net.service_channel import GENERATE, STEP_STREAM
from pdserve.common.request.request_bytes import encode_request
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.step_wire import StepEvent, StepTokens, columns_of
from pdserve.v1 import decode_pb2, step_stream_pb2
from pdserve.worker.step_stream.step_outbox import ROOM_BYTES, StepOutbox
from tests.support.waiting import HANG_S, eventually
from tests.support.worker_pair import Pair, check_at_rest, generation_request, host_of, running_pair


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    async with running_pair(tiny_checkpoints("llama"), num_blocks=32, max_model_len=64, lease_grace_s=0.3) as made:
        yield made
        for worker in (made.p, made.d):
            await check_at_rest(worker)


class Router:
    """One stream to a decode worker, and what came of its calls."""

    def __init__(self, pair: Pair) -> None:
        self._worker, self._service = pair.d, pair.service(pair.d)
        self._call: Any = None
        self.tokens: dict[int, list[int]] = {}
        self.events: dict[int, list[str]] = {}
        self.ends: dict[int, str] = {}

    def submission(self, key: int, **changes: Any) -> step_stream_pb2.Submission:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": 8} | changes)
        request = encode_request(generation_request(self._worker, sampling_params=sampling))
        message = decode_pb2.DecodeRequest(generation_request=request)
        return step_stream_pb2.Submission(key=key, decode_request=message.SerializeToString())

    async def send(self, *submissions: step_stream_pb2.Submission, **fields: Any) -> None:
        commands = step_stream_pb2.StepCommands(submissions=submissions, **fields).SerializeToString()
        if self._call is None:
            self._call = self._service.stream_stream(STEP_STREAM, commands)
        await self._call.write(commands)

    async def until(self, is_done: Callable[[], bool]) -> None:
        """Read until then. Raises: the error that ended the stream."""
        async with asyncio.timeout(HANG_S):
            while not is_done():
                try:
                    message = await self._call.read()
                except grpc.aio.AioRpcError as error:
                    raise from_rpc_error(error) from None
                assert message is not grpc.aio.EOF
                self._take(message)

    def _take(self, message: step_stream_pb2.StepOutputs) -> None:
        columns, at = columns_of(message), 0
        tokens = list(zip(columns.keys, columns.token_ids, strict=True))
        for event in message.events:
            self._add(tokens[at : event.num_before])
            at = event.num_before
            if event.HasField("end"):
                self.ends[event.key] = event.end.code
                continue
            decoded = decode_pb2.DecodeEvent.FromString(event.message)
            self.events.setdefault(event.key, []).append(str(decoded.WhichOneof("event")))
            self._add([(event.key, list(decoded.outputs.token_ids))])
        self._add(tokens[at:])

    def _add(self, tokens: list[tuple[int, list[int]]]) -> None:
        for key, token_ids in tokens:
            self.tokens.setdefault(key, []).extend(token_ids)

    def close(self) -> None:
        self._call.cancel()


async def test_a_call_has_the_tokens_of_one_with_a_stream_of_its_own(pair: Pair) -> None:
    router = Router(pair)
    submission = router.submission(1, max_tokens=6)
    own: Any = pair.service(pair.d).unary_stream(
        GENERATE, decode_pb2.DecodeRequest.FromString(submission.decode_request)
    )
    events = [event async for event in own]
    await router.send(router.submission(1, max_tokens=6))
    await router.until(lambda: 1 in router.ends)
    assert router.tokens[1] == [id_ for event in events for id_ in event.outputs.token_ids]
    assert len(router.tokens[1]) == 6
    # the first output and the last one have more than tokens
    assert router.events[1] == ["admitted", "outputs", "outputs"]
    assert router.ends == {1: ""}
    router.close()


async def test_what_one_call_brings_ends_no_other(pair: Pair) -> None:
    router = Router(pair)
    garbage = step_stream_pb2.Submission(key=2, decode_request=b"\xff\xff\xff")
    wrong_role = step_stream_pb2.Submission(key=3, prefill_request=b"")
    empty, too_many = step_stream_pb2.Submission(key=4), router.submission(5, n=100)
    await router.send(router.submission(1), garbage, wrong_role, empty, too_many, cancelled=[77])
    await router.send(ended_sequences=[step_stream_pb2.EndedSequences(key=78, indexes=[0])])
    await router.until(lambda: len(router.ends) == 5)
    assert router.ends == {
        1: "", 2: "peer_error", 3: "invalid_request", 4: "invalid_request", 5: "invalid_request",
    }  # fmt: skip
    assert len(router.tokens[1]) == 8
    router.close()


@pytest.mark.parametrize("how", ["call", "stream", "key"])
async def test_cancelled_calls_leave_the_engine(pair: Pair, how: str) -> None:
    router, scheduler = Router(pair), host_of(pair.d).core.scheduler
    await router.send(router.submission(1, max_tokens=50), router.submission(2, max_tokens=50))
    await router.until(lambda: len(router.tokens) == 2)
    if how == "call":
        await router.send(cancelled=[1, 2])
    elif how == "stream":
        router.close()
    else:
        await router.send(router.submission(2))
        with pytest.raises(InvalidRequest, match="keys rise from 1"):
            await router.until(lambda: False)
    await eventually(lambda: not scheduler.pool.num_in_use and not pair.d.engine.num_streams)
    router.close()


async def test_a_sequence_whose_text_is_complete_ends_alone(pair: Pair) -> None:
    router = Router(pair)
    await router.send(router.submission(1, max_tokens=50, n=2))
    await router.until(lambda: bool(router.tokens.get(1)))
    await router.send(ended_sequences=[step_stream_pb2.EndedSequences(key=1, indexes=[0, 1])])
    await router.until(lambda: 1 in router.ends)
    assert router.ends == {1: ""}
    assert len(router.tokens[1]) < 100
    router.close()


async def test_a_worker_that_drains_refuses_calls_and_ends_the_stream(pair: Pair) -> None:
    router = Router(pair)
    pair.d.engine.draining = True
    await router.send(router.submission(1))
    await router.until(lambda: 1 in router.ends)
    assert router.ends == {1: "draining"}
    assert pair.d._step_streams is not None
    pair.d._step_streams.close()
    with pytest.raises(AssertionError):
        await router.until(lambda: False)


async def test_an_outbox_that_is_not_read_ends_with_an_error_and_keeps_nothing() -> None:
    full: list[bool] = []
    outbox = StepOutbox(lambda: full.append(True), max_unsent_bytes=1000)
    for position in range(100):
        outbox.tokens(1, 0, position, [1])
    assert full == [True]
    with pytest.raises(PeerError, match="more than 1000 bytes"):
        await outbox.take()


async def test_an_outbox_gives_large_events_in_parts_and_has_room_again() -> None:
    outbox = StepOutbox(lambda: None)
    events = [StepEvent(1, bytes(ROOM_BYTES // 3)) for _ in range(10)]
    for event in events:
        outbox.event(event)
    waiting = asyncio.create_task(outbox.room())
    taken: list[StepTokens | StepEvent] = []
    while len(taken) < len(events):
        assert not waiting.done()
        part: Sequence[StepTokens | StepEvent] | None = await outbox.take()
        assert part is not None
        assert len(part) <= 4
        taken += part
    assert taken == events
    await asyncio.wait_for(waiting, HANG_S)


async def test_an_outbox_ends_after_what_was_added() -> None:
    outbox = StepOutbox(lambda: None)
    outbox.tokens(1, 0, 0, [5])
    outbox.end()
    assert await outbox.take() == [StepTokens(1, 0, 0, [5])]
    assert await outbox.take() is None
