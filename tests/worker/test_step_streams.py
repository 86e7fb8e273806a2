"""Calls over a router's stream: each ends by itself, and nothing that one of them brings ends another."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from pdserve.common.errors import InvalidRequest, PeerError
from pdserve.common.net.rpc import MAX_STREAMS_PER_CONNECTION, from_rpc_error
from pdserve.common.net.service_channel import STEP_STREAM
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.wire.step_wire import (
    MAX_COMMANDS,
    MAX_EVENTS,
    MAX_SUBMISSIONS,
    StepEvent,
    StepTokens,
    columns_of,
    merged,
    step_outputs,
)
from pdserve.common.security.peer_message import parsed
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2, step_stream_pb2
from pdserve.worker.step_stream import step_outbox
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.step_stream.step_outbox import LARGE_BYTES, ROOM_BYTES, UNREAD_S, StepOutbox
from pdserve.worker.step_stream.step_stream_servicer import _Stream
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.worker_call import WorkerCall, submission
from tests.support.transfers.worker_pair import Pair, check_at_rest, door_of, generation_request, running_pair


@pytest.fixture
async def pair(tiny_checkpoints: Callable[..., Path]) -> AsyncIterator[Pair]:
    async with running_pair(tiny_checkpoints("llama"), num_blocks=32, max_model_len=64, lease_grace_s=0.3) as made:
        yield made
        for worker in (made.p, made.d):
            await check_at_rest(worker)


class Router:
    """One stream to a decode worker, and what came of its calls."""

    def __init__(self, pair: Pair, *, of_prefill: bool = False) -> None:
        """of_prefill: the stream is to the prefill worker."""
        self._worker = pair.p if of_prefill else pair.d
        self._service = pair.service(self._worker)
        self._call: Any = None
        self.tokens: dict[int, list[int]] = {}
        self.events: dict[int, list[str]] = {}
        self.ends: dict[int, str] = {}

    def submission(self, key: int, request_id: str | None = None, **changes: Any) -> step_stream_pb2.Submission:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": 8} | changes)
        named: dict[str, Any] = {} if request_id is None else {"request_id": request_id}
        return submission("decode", generation_request(self._worker, sampling_params=sampling, **named), key=key)

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


async def test_the_first_output_and_the_last_are_events_and_the_others_columns(pair: Pair) -> None:
    router = Router(pair)
    await router.send(router.submission(1, max_tokens=6))
    await router.until(lambda: 1 in router.ends)
    assert len(router.tokens[1]) == 6
    # the first output and the last one have more than tokens
    assert router.events[1] == ["admitted", "outputs", "outputs"]
    assert router.ends == {1: ""}
    router.close()


async def test_what_one_call_brings_ends_no_other(pair: Pair) -> None:
    router = Router(pair)
    garbage = submission("decode", b"\xc1\xff\xff", key=2)
    wrong_role = submission("prefill", b"", key=3)
    empty, too_many = step_stream_pb2.Submission(key=4), router.submission(5, n=100)
    await router.send(router.submission(1), garbage, wrong_role, empty, too_many, cancelled=[77])
    await router.send(ended_sequences=[step_stream_pb2.EndedSequences(key=78, indexes=[0])])
    await router.until(lambda: len(router.ends) == 5)
    assert router.ends == {
        1: "", 2: "peer_error", 3: "invalid_request", 4: "invalid_request", 5: "invalid_request",
    }  # fmt: skip
    assert len(router.tokens[1]) == 8
    router.close()


async def test_one_of_several_calls_of_a_name_is_served(pair: Pair) -> None:
    router = Router(pair)
    await router.send(*(router.submission(key, "same", n=4, prompt_logprobs=1) for key in (1, 2, 3)))
    await router.until(lambda: len(router.ends) == 3)
    assert router.ends == {1: "", 2: "invalid_request", 3: "invalid_request"}
    assert len(router.tokens[1]) == 4 * 8
    await check_at_rest(pair.d)
    await eventually(lambda: not pair.d.engine._taken)
    await router.send(router.submission(4, "same", n=4, prompt_logprobs=1))
    await router.until(lambda: 4 in router.ends)
    assert router.ends[4] == ""
    router.close()


async def test_a_stream_that_has_ended_takes_no_place_of_its_connection(pair: Pair) -> None:
    """gRPC counts a call until it is freed, so it must not wait for a collection of garbage."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(MAX_STREAMS_PER_CONNECTION + 20):
            router = Router(pair)
            # a submission that is refused: the stream is answered, and nothing is computed
            await router.send(step_stream_pb2.Submission(key=1))
            await router.until(lambda ends=router.ends: 1 in ends)  # type: ignore[misc]
            router.close()
    finally:
        gc.enable()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["call", "stream", "key"])
async def test_cancelled_calls_leave_the_engine(pair: Pair, how: str) -> None:
    router, scheduler = Router(pair), door_of(pair.d).core.scheduler
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


TOO_MANY: dict[str, Any] = {
    "submissions": [step_stream_pb2.Submission(key=key) for key in range(2, MAX_SUBMISSIONS + 3)],
    "turns": [step_stream_pb2.Turn(key=1)] * (MAX_COMMANDS + 1),
    "cancelled": range(MAX_COMMANDS + 1),
    "ended_sequences": [step_stream_pb2.EndedSequences(key=1, indexes=range(MAX_COMMANDS + 1))],
}


LIMITS = dict.fromkeys(TOO_MANY, MAX_COMMANDS) | {"submissions": MAX_SUBMISSIONS}


@pytest.mark.few(1)
@pytest.mark.parametrize("field", TOO_MANY)
async def test_a_message_with_too_many_commands_ends_the_stream(pair: Pair, field: str) -> None:
    router = Router(pair)
    await router.send(router.submission(1, max_tokens=50))
    await router.until(lambda: 1 in router.tokens)
    if field == "submissions":
        await router.send(*TOO_MANY[field])
    else:
        await router.send(**{field: TOO_MANY[field]})
    with pytest.raises(InvalidRequest, match=f"{field} has {LIMITS[field] + 1} entries"):
        await router.until(lambda: False)


class Recorded:
    """A stream whose calls note what happens to them."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.stream = _Stream({"decode": self._begin})

    def _begin(self, submission: step_stream_pb2.Submission, call: StepCall) -> None:
        name = submission.key
        self.happened.append(f"{name} begins")
        call.on_cancel = lambda: self.happened.append(f"{name} is cancelled")

    async def read(self, *messages: step_stream_pb2.StepCommands) -> None:
        async def commands() -> AsyncIterator[step_stream_pb2.StepCommands]:
            for message in messages:
                yield message

        await self.stream.read(commands())


def begun(*keys: int, cancelled: Sequence[int] = ()) -> step_stream_pb2.StepCommands:
    submissions = [submission("decode", b"", key=key) for key in keys]
    return step_stream_pb2.StepCommands(submissions=submissions, cancelled=cancelled)


async def test_calls_are_cancelled_before_others_begin() -> None:
    recorded = Recorded()
    await recorded.read(begun(1, 2), begun(3, cancelled=[1]))
    assert recorded.happened == ["1 begins", "2 begins", "1 is cancelled", "3 begins"]


async def test_a_stream_that_has_ended_begins_no_more_calls() -> None:
    recorded = Recorded()
    await recorded.read(begun(1))
    recorded.stream.end()
    await recorded.read(begun(2), begun(3))
    assert recorded.happened == ["1 begins", "1 is cancelled"]


async def test_a_wrong_message_cancels_the_calls_even_if_the_router_reads_nothing() -> None:
    recorded = Recorded()
    await recorded.read(begun(1), begun(1))
    assert recorded.happened == ["1 begins", "1 is cancelled"]
    with pytest.raises(InvalidRequest, match="keys rise from 1"):
        await recorded.stream.outbox.take()


async def test_many_calls_of_one_message_leave_the_event_loop_to_others() -> None:
    recorded, num_turns = Recorded(), 0

    async def beside() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(beside())
    await recorded.read(begun(*range(1, MAX_SUBMISSIONS + 1)))
    task.cancel()
    assert len(recorded.happened) == MAX_SUBMISSIONS
    assert num_turns > MAX_SUBMISSIONS / 20


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


async def test_what_is_added_to_an_outbox_after_its_error_is_not_kept() -> None:
    outbox = StepOutbox(lambda: None, max_unsent_bytes=1000)
    for position in range(100):
        outbox.tokens(1, 0, position, [1])
        outbox.event(StepEvent(2, bytes(100)))
    assert not outbox._entries
    await asyncio.wait_for(outbox.room(), HANG_S)


async def test_an_outbox_merges_what_is_not_read() -> None:
    outbox, sent = StepOutbox(lambda: None, max_unsent_bytes=4 << 20), 2000
    for position in range(sent):
        for key in range(1, 11):
            outbox.tokens(key, key % 2, position, [position])
    assert len(outbox._entries) < 5000
    taken: list[StepTokens | StepEvent] = []
    while len(entries := merged(taken)) < 10 or len(entries[-1].token_ids) < sent:  # type: ignore[union-attr]
        taken += await outbox.take() or ()
    assert entries == [StepTokens(key, key % 2, 0, list(range(sent))) for key in range(1, 11)]


async def test_a_message_has_no_more_events_than_a_router_reads() -> None:
    outbox = StepOutbox(lambda: None)
    sent = [StepEvent(key, b"x", is_end=False) for key in range(5000)]
    for event in sent:
        outbox.event(event)
    received: list[StepEvent] = []
    while len(received) < len(sent):
        entries = await outbox.take()
        assert entries is not None
        message = parsed("a message", step_stream_pb2.StepOutputs.FromString, step_outputs(entries).SerializeToString())
        assert len(message.events) <= MAX_EVENTS
        received += [StepEvent(event.key, event.message) for event in message.events]
    assert received == sent


def piece(number: int, num_bytes: int) -> prefill_pb2.PrefillEvent:
    """Log-probabilities of a prompt of about this size."""
    logprobs = request_pb2.Logprobs(width=1, logprobs=[0.0] * (num_bytes // 4))
    return prefill_pb2.PrefillEvent(
        prompt_logprobs=request_pb2.PromptLogprobs(first_position=number, logprobs=logprobs)
    )


@pytest.mark.slow
async def test_large_events_of_many_calls_stay_within_the_room_and_small_ones_pass() -> None:
    full: list[bool] = []
    outbox, num_calls, num_pieces = StepOutbox(lambda: full.append(True), max_unsent_bytes=4 << 20), 30, 4

    async def pieces() -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        for number in range(num_pieces):
            yield piece(number, ROOM_BYTES // 2)

    async def small() -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        yield piece(0, LARGE_BYTES // 2)

    ended: list[int] = []
    for key in range(num_calls):
        StepCall(key, outbox, ended.append).serve(pieces())
    await eventually(lambda: outbox._num_bytes > ROOM_BYTES)
    StepCall(num_calls, outbox, ended.append).serve(small())
    await eventually(lambda: num_calls in ended)
    came: dict[int, list[int]] = {}
    while len(ended) <= num_calls or outbox._entries:
        assert outbox._num_bytes < 3 * ROOM_BYTES
        for entry in await asyncio.wait_for(outbox.take(), HANG_S) or ():
            assert isinstance(entry, StepEvent)
            if not entry.is_end:
                event = prefill_pb2.PrefillEvent.FromString(entry.message)
                came.setdefault(entry.key, []).append(event.prompt_logprobs.first_position)
        await asyncio.sleep(0)
    assert not full
    assert came == {key: list(range(num_pieces)) for key in range(num_calls)} | {num_calls: [0]}


def outputs(position: int, num_bytes: int = 0) -> decode_pb2.DecodeEvent:
    """New tokens with log-probabilities of about this size."""
    logprobs = request_pb2.Logprobs(width=1, logprobs=[0.0] * (num_bytes // 4))
    return decode_pb2.DecodeEvent(outputs=request_pb2.Outputs(first_position=position, logprobs=logprobs))


async def positions(outbox: StepOutbox, key: int) -> list[int]:
    """First positions of the outputs of a call that are taken until its end."""
    came: list[int] = []
    while True:
        entries = await asyncio.wait_for(outbox.take(), HANG_S)
        assert entries is not None
        assert outbox._num_bytes < 3 * ROOM_BYTES
        for entry in entries:
            if entry.key != key:
                continue
            if isinstance(entry, StepTokens):
                came.append(entry.first_position)
            elif entry.is_end:
                return came
            else:
                came.append(decode_pb2.DecodeEvent.FromString(entry.message).outputs.first_position)
        await asyncio.sleep(0)


async def test_what_a_call_pushes_after_a_large_event_follows_it_and_other_calls_pass() -> None:
    ended: list[int] = []
    outbox = StepOutbox(lambda: None)
    call, other = StepCall(1, outbox, ended.append), StepCall(2, outbox, ended.append)
    for position in range(0, 20, 2):
        call.event(outputs(position, ROOM_BYTES // 2))
        call.tokens(0, position + 1, [5])
    call.end()
    assert call.has_ended
    await eventually(lambda: outbox._num_bytes > ROOM_BYTES)
    other.event(outputs(0))
    other.end()
    assert ended == [2]
    assert await positions(outbox, 1) == list(range(20))
    await eventually(lambda: ended == [2, 1])
    assert outbox._num_held == 0


async def test_events_that_are_large_together_are_made_as_the_router_reads() -> None:
    outbox, made = StepOutbox(lambda: None), list[int]()

    def pieces() -> Iterator[decode_pb2.DecodeEvent]:
        for position in range(10):
            made.append(position)
            yield outputs(position, ROOM_BYTES // 2)

    call = StepCall(1, outbox, lambda _: None)
    call.events(pieces())
    call.tokens(0, 10, [5])
    call.end()
    await eventually(lambda: outbox._num_bytes > ROOM_BYTES)
    await asyncio.sleep(0)
    assert len(made) < 5
    assert await positions(outbox, 1) == list(range(11))


async def test_a_stream_ends_after_what_waits() -> None:
    outbox = StepOutbox(lambda: None)
    call = StepCall(1, outbox, lambda _: None)
    for position in range(4):
        call.event(outputs(position, ROOM_BYTES))
    call.end()
    outbox.end()
    assert await positions(outbox, 1) == [0, 1, 2, 3]
    assert await asyncio.wait_for(outbox.take(), HANG_S) is None
    assert outbox.num_waiting == 0


async def test_a_cancelled_call_drops_what_waits() -> None:
    outbox, cancelled = StepOutbox(lambda: None), list[bool]()
    call = StepCall(1, outbox, lambda _: None)
    call.on_cancel = lambda: cancelled.append(True)
    for position in range(10):
        call.event(outputs(position, ROOM_BYTES))
    await eventually(lambda: outbox._num_bytes > ROOM_BYTES)
    call.cancel()
    call.event(outputs(10, ROOM_BYTES))
    call.end()
    assert cancelled == [True]
    assert outbox._num_held == 0
    await outbox.take()
    assert not outbox._entries


@pytest.mark.parametrize("reads", [True, False])
async def test_large_events_end_the_stream_of_a_router_that_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    full, now = list[bool](), 0.0
    monkeypatch.setattr(step_outbox, "clock", SimpleNamespace(monotonic=lambda: now))
    outbox = StepOutbox(lambda: full.append(True), max_unsent_bytes=4 << 20)
    call = StepCall(1, outbox, lambda _: None)
    for position in range(20):
        call.event(outputs(position, ROOM_BYTES))
        await asyncio.sleep(0)
        now += UNREAD_S / 4
        if reads and position % 3 == 2:
            await outbox.take()
    assert full == ([] if reads else [True])
    call.cancel()
    assert outbox._num_held == 0


async def test_a_message_that_cannot_be_made_ends_its_call(caplog: pytest.LogCaptureFixture) -> None:
    outbox, happened = StepOutbox(lambda: None), list[str]()
    call = StepCall(1, outbox, lambda _: happened.append("ended"))
    call.on_cancel = lambda: happened.append("cancelled")

    def broken() -> Iterator[decode_pb2.DecodeEvent]:
        yield outputs(0)
        raise ValueError("a bug")

    call.events(broken())
    await eventually(lambda: happened == ["ended", "cancelled"])
    entries = await outbox.take()
    assert entries is not None
    assert [isinstance(entry, StepEvent) and entry.is_end for entry in entries] == [False, True]
    assert "a call of a step stream failed" in caplog.text


async def test_a_second_turn_that_comes_too_early_ends_the_stream(pair: Pair) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    session = WorkerCall(pair.service(pair.d), "session", generation_request(pair.d, sampling_params=params))
    assert (await session.read()).HasField("admitted")
    for _ in range(2):
        await session.send_turn(generation_request(pair.d, [5, 6]))
    error = await session.end()
    assert isinstance(error, InvalidRequest)
    assert "arrived before the one before it had begun" in error.message


async def test_sessions_beyond_the_limit_of_one_message_are_refused(pair: Pair) -> None:
    router, most = Router(pair), pair.d.engine.max_sessions
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    await router.send(
        *(
            submission("session", generation_request(pair.d, sampling_params=params), key=key)
            for key in range(1, most + 3)
        )
    )
    await router.until(lambda: len(router.ends) == 2)
    assert router.ends == {most + 1: "overloaded", most + 2: "overloaded"}
    assert pair.d.engine.num_sessions == most
    router.close()
    await eventually(lambda: not pair.d.engine.num_sessions)
