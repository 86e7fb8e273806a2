"""`EngineClient` and its thread: streams, refusals, aborts, and an engine that fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import (
    DeadlineExceeded,
    Draining,
    Evicted,
    InvalidRequest,
    NeedsPrefill,
    Overloaded,
    WorkerLost,
)
from pdserve.common.request.engine_types import EngineCoreOutput, FinishReason, LogprobsLists
from pdserve.common.request.wire.messages import outputs_to_wire
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.output_stream import OutputStream
from pdserve.engine.scheduler.kv_messages import HoldReturned, ReceiveInto
from pdserve.engine.stats.iteration_stats import IterationStats
from pdserve.engine.stats.stat_recorder import StatRecorder
from pdserve.worker.engine_client import EngineClient, RequestStream
from pdserve.worker.request_reader import engine_request_id
from tests.support.engine.bare_engine import client_of
from tests.support.engine.engine_harness import MakeEngine, harnesses, make_engine  # noqa: F401
from tests.support.engine.hash_model import greedy_answer
from tests.support.run.waiting import HANG_S, eventually
from tests.worker.client_harness import ClientHarness, with_client

PROMPT = list(range(22))


@pytest.fixture
async def engine(make_engine: MakeEngine) -> AsyncIterator[ClientHarness]:  # noqa: F811
    async with with_client(make_engine(max_num_batched_tokens=8, max_local_prefill_tokens=40)) as harness:
        yield harness


async def read(stream: OutputStream) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(HANG_S):
        async for output in stream:
            assert output.first_position == len(tokens)
            tokens += output.new_token_ids
    return tokens


async def test_i4_a_stream_has_every_token_once_however_slowly_it_is_read(engine: ClientHarness) -> None:
    client = engine.client
    slow, fast = (client.submit(engine.request([*PROMPT, n], params={"max_tokens": 20})) for n in range(2))
    assert await read(fast) == greedy_answer([*PROMPT, 1], 20)
    outputs = [output async for output in slow]
    assert len(outputs) == 1
    assert outputs[0].new_token_ids == greedy_answer([*PROMPT, 0], 20)
    assert outputs[0].finish_reason is FinishReason.LENGTH
    assert {"queued", "scheduled", "first_token", "finished"} <= set(outputs[0].moments)
    for stream in (slow, fast):
        client.release(stream)
        client.release(stream)
    assert client.num_streams == 0


async def test_i7_a_released_stream_aborts_its_request(engine: ClientHarness) -> None:
    stream = engine.client.submit(engine.request(PROMPT, params={"max_tokens": 200}))
    await asyncio.wait_for(stream.get(), HANG_S)
    engine.client.release(stream)
    await eventually(lambda: not engine.scheduler.requests)
    assert engine.scheduler.pool.num_in_use == 0


async def test_a_name_is_taken_until_the_engine_has_said_its_last_word_of_it(engine: ClientHarness) -> None:
    """Else the next of that name would be told how the last one was aborted."""
    client = engine.client
    for number in range(20):
        first = client.submit(engine.request([*PROMPT, number], "same", params={"max_tokens": 60}))
        await first.get()
        client.release(first)
        with pytest.raises(InvalidRequest, match="request same is here already") as refused:
            client.verify(engine.request([*PROMPT, 30], "same"))
        assert refused.value.field == "request_id"
        await eventually(lambda: not client._taken)
        second = client.submit(engine.request([*PROMPT, 30], "same"))
        assert await read(second) == greedy_answer([*PROMPT, 30], 4)
        client.release(second)
        await eventually(lambda: not client._taken)


async def test_of_two_requests_with_a_sequence_of_one_name_the_second_is_refused(engine: ClientHarness) -> None:
    """Both were verified before one was submitted. The engine would lose the blocks of one of two sequences of a name."""
    client = engine.client
    one = engine.request(PROMPT, "r")
    forks = msgspec.structs.replace(one, n=2, sampling_params=msgspec.structs.replace(one.sampling_params, n=2))
    for other in (forks, engine.request([*PROMPT, 1], forks.sequence_id(1))):
        client.verify(forks)
        client.verify(other)
        stream = client.submit(forks)
        with pytest.raises(InvalidRequest, match="is here already") as refused:
            client.submit(other)
        assert refused.value.field == "request_id"
        tokens: dict[int, list[int]] = {0: [], 1: []}
        while min(map(len, tokens.values())) < 4:
            output = await asyncio.wait_for(stream.get(), HANG_S)
            tokens[output.index] += output.new_token_ids
        assert tokens[0] == tokens[1] == greedy_answer(PROMPT, 4)
        client.release(stream)
        await eventually(lambda: not client._taken)
        await eventually(lambda: not engine.scheduler.pool.num_in_use)


async def test_what_the_engine_refuses_is_raised_from_the_stream(engine: ClientHarness) -> None:
    stream = engine.client.submit(engine.request([1] * 41))
    with pytest.raises(NeedsPrefill) as caught:
        await read(stream)
    assert caught.value.uncached_tokens == 41


async def test_a_wrong_request_never_reaches_the_engine(engine: ClientHarness) -> None:
    good = engine.request(PROMPT, "r")
    for changes, field in (
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [0] * 256}, "prompt_token_ids"),
        ({"prompt_token_ids": [64]}, "prompt_token_ids"),
        ({"sampling_params": msgspec.structs.replace(good.sampling_params, top_p=0.0)}, "top_p"),
        ({"sampling_params": msgspec.structs.replace(good.sampling_params, stop_token_ids=(64,))}, "stop_token_ids"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            engine.client.verify(msgspec.structs.replace(good, **changes))
        assert caught.value.field == field
    assert engine.client.num_streams == 0


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(engine: ClientHarness) -> None:
    stream = engine.client.submit(engine.request(PROMPT))
    engine.client.draining = True
    with pytest.raises(Draining):
        engine.client.submit(engine.request(PROMPT))
    assert await read(stream) == greedy_answer(PROMPT, 4)


async def test_an_idle_engine_ticks_on(engine: ClientHarness) -> None:
    before = engine.client.tick
    await eventually(lambda: engine.client.tick >= before + 2)


async def test_a_failed_step_ends_every_request_with_an_error_and_says_so(engine: ClientHarness) -> None:
    def fail() -> None:
        raise ValueError("a bug in a kernel")

    engine.model.before_step = fail
    streams = [engine.client.submit(engine.request([n] * 9)) for n in range(3)]
    for stream in streams:
        with pytest.raises(WorkerLost, match="log has the details"):
            await read(stream)
    await asyncio.wait_for(engine.client.died.wait(), HANG_S)
    with pytest.raises(WorkerLost):
        engine.client.submit(engine.request(PROMPT))
    assert "a bug" not in engine.answers


async def test_a_request_that_a_failing_engine_never_takes_in_ends_with_the_same_error(engine: ClientHarness) -> None:
    late: list[OutputStream] = []
    submitted = threading.Event()
    loop = asyncio.get_running_loop()

    def submit() -> None:
        late.append(engine.client.submit(engine.request([7] * 9)))
        submitted.set()

    def fail() -> None:
        loop.call_soon_threadsafe(submit)
        assert submitted.wait(HANG_S)
        raise ValueError("a bug in a kernel")

    engine.model.before_step = fail
    heard: list[EngineCoreOutput] = []
    stream = engine.client.submit(engine.request([5] * 9), heard.append)
    await asyncio.wait_for(engine.client.died.wait(), HANG_S)
    for each in (stream, *late):
        with pytest.raises(WorkerLost, match="log has the details"):
            await read(each)
    assert len(late) == len(heard) == 1


async def test_tokens_come_in_pieces_of_the_interval_but_the_first_and_the_last_wait_for_none(
    engine: ClientHarness,
) -> None:
    request = engine.request(PROMPT, params={"max_tokens": 12})
    stream = engine.client.submit(request, stream_interval=4)
    answer = greedy_answer(PROMPT, 12)
    pieces: list[EngineCoreOutput] = []
    async with asyncio.timeout(HANG_S):
        while not pieces or pieces[-1].finish_reason is None:
            pieces.append(await stream.get())
    assert [len(piece.new_token_ids) for piece in pieces] == [1, 4, 4, 3]
    assert [piece.first_position for piece in pieces] == [0, 1, 5, 9]
    assert [token for piece in pieces for token in piece.new_token_ids] == answer
    assert {"queued", "scheduled", "first_token"} <= set(pieces[0].moments)
    assert "finished" in pieces[-1].moments
    engine.client.release(stream)


def output(index: int, tokens: list[int], **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r", index=index, new_token_ids=tokens, **fields)


async def test_each_sequence_and_each_turn_has_an_interval_of_its_own() -> None:
    stream = OutputStream("r", num_sequences=2, interval=3)
    for put in (
        output(0, [], prefills_locally=True),  # says where the prompt is computed, at once
        output(0, [1], first_position=0),
        output(1, [5], first_position=0),
        output(0, [2], first_position=1),
        output(1, [6], first_position=1, finish_reason=FinishReason.STOP),
        output(0, [3], first_position=2, finish_reason=FinishReason.STOP, awaits_input=True),
        output(0, [4], first_position=0),
        output(0, [7], first_position=1, finish_reason=FinishReason.STOP, awaits_input=True),
    ):
        stream.put(put)
    heard = [await stream.get() for _ in range(7)]
    assert [(each.index, each.first_position, each.new_token_ids) for each in heard] == [
        (0, 0, []), (0, 0, [1]), (1, 0, [5]), (1, 1, [6]), (0, 1, [2, 3]), (0, 0, [4]), (0, 1, [7]),
    ]  # fmt: skip


async def test_outputs_with_many_log_probabilities_stay_messages_of_a_mebibyte() -> None:
    """A reader that is busy gets several outputs, in order, each of at most 1 MiB and one output more."""
    width, stream = 1025, OutputStream("r", interval=1000)
    for place in range(400):
        logprobs = LogprobsLists([[place] * width], [[0.0] * width], [1])
        reason = FinishReason.LENGTH if place == 399 else None
        stream.put(output(0, [place], first_position=place, new_logprobs=logprobs, finish_reason=reason))
    outputs = [each async for each in stream]
    assert [token for each in outputs for token in each.new_token_ids] == list(range(400))
    lengths = [len(each.new_token_ids) for each in outputs]
    assert [each.first_position for each in outputs] == list(accumulate(lengths[:-1], initial=0))
    assert len(outputs) > 2
    assert all(outputs_to_wire(each, {}).ByteSize() < 3 << 20 for each in outputs)


async def test_an_error_waits_for_no_tokens() -> None:
    stream = OutputStream("r", interval=100)
    stream.put(output(0, [1]))
    stream.put(output(0, [2]))
    stream.put(output(0, [], error_code="evicted", error_message="x", finish_reason=FinishReason.ERROR))
    assert (await stream.get()).new_token_ids == [1]
    with pytest.raises(Evicted, match="x"):
        await stream.get()


async def test_an_error_is_raised_even_when_tokens_came_before_it() -> None:
    stream = OutputStream("r")
    stream.put(EngineCoreOutput(request_id="r", new_token_ids=[1]))
    stream.put(
        EngineCoreOutput(request_id="r", error_code="evicted", error_message="x", finish_reason=FinishReason.ERROR)
    )
    with pytest.raises(Exception, match="x"):
        await read(stream)


def test_every_attempt_has_engine_requests_of_its_own() -> None:
    assert engine_request_id("r", 2, 1) == "r.2.1"


async def test_a_request_ends_at_its_deadline_though_its_reader_does_nothing(engine: ClientHarness) -> None:
    client = engine.client
    engine.model.before_step = lambda: time.sleep(0.002)  # so that it is not done before
    request = engine.request(PROMPT, params={"max_tokens": 200, "ignore_eos": True}, deadline=time.monotonic() + 0.05)
    parked = client.submit(engine.request(PROMPT, remote_prefill=True, deadline=time.monotonic() + 0.05))
    stream = client.submit(request)
    for each in (stream, parked):
        with pytest.raises(DeadlineExceeded):
            await read(each)
    await eventually(lambda: not engine.scheduler.requests)
    client.release(stream)
    client.release(parked)
    for message in engine.outbox.take():
        if isinstance(message, ReceiveInto):
            returned = HoldReturned(message.request_id, message.hold)
            engine.door.side.post(partial(EngineCore.apply, event=returned))


async def test_a_deadline_that_was_not_reached_leaves_nothing_behind(engine: ClientHarness) -> None:
    client = engine.client
    stream = client.submit(engine.request(PROMPT, params={"max_tokens": 3}, deadline=time.monotonic() + HANG_S))
    [timer] = client._deadlines.values()
    assert len(await read(stream)) == 3
    client.release(stream)
    assert timer.cancelled()
    assert not client._deadlines


async def test_more_requests_than_may_wait_are_refused(make_engine: MakeEngine) -> None:  # noqa: F811
    harness = make_engine(max_num_batched_tokens=8, max_num_seqs=2)
    door = client_of(harness.core)
    client = EngineClient(door, max_waiting=3)
    door.start(warm_up=False)
    try:
        streams: list[RequestStream] = []

        def fill() -> None:
            # the engine may take two of them while the others come
            for n in range(9):
                streams.append(client.submit(harness.request([*PROMPT, n], params={"max_tokens": 200})))

        with pytest.raises(Overloaded, match=r"3 requests wait on this worker, at most 3 may \(max_waiting\)"):
            fill()
        assert 3 <= len(streams) <= 5
        for stream in streams:
            client.release(stream)
        await eventually(lambda: not client.num_waiting)
        again = client.submit(harness.request(PROMPT, params={"max_tokens": 3}))
        assert await read(again) == greedy_answer(PROMPT, 3)
        client.release(again)
    finally:
        await client.close()


async def test_statistics_are_summed_and_reach_the_loggers(make_engine: MakeEngine) -> None:  # noqa: F811
    class Logger:
        num_steps = num_logs = 0

        def record(self, scheduler_stats: object, iteration_stats: IterationStats) -> None:
            self.num_steps += iteration_stats.model_runner_stats is not None
            ended.extend(one.num_generation_tokens for one in iteration_stats.finished_requests)

        def log(self) -> None:
            self.num_logs += 1

    logger, ended = Logger(), list[int]()
    harness = make_engine(max_num_batched_tokens=8, collect_layer_times=True)
    door = client_of(harness.core)
    door.recorder = StatRecorder([logger])  # type: ignore[list-item]
    client = EngineClient(door)
    door.start(warm_up=False)
    stream = client.submit(harness.request(PROMPT))
    assert await read(stream) == greedy_answer(PROMPT, 4)
    client.release(stream)
    await eventually(lambda: client.stats.num_running_reqs == 0)
    await client.close()
    assert client.stats.num_steps == logger.num_steps == 6
    assert (client.stats.num_scheduled_tokens, ended, logger.num_logs) == (len(PROMPT) + 3, [4], 1)
    totals = client.step_totals
    assert len(totals.layer_s) == 1
    assert 0 < totals.layer_s[0] <= totals.stage_s["forward"]
    assert min(totals.stage_s.values()) > 0
