"""The receiving side of transfers in the engine: reservation, parking, landing, quarantine, events at the wrong time."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import DigestMismatch, InvalidRequest, TransferFailed
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.request import RequestStatus
from pdserve.engine.scheduler.kv_messages import (
    HoldReturned,
    Landed,
    ReceiveFailed,
    ReceiveInto,
    SourceFinished,
    StopReceiving,
    Want,
)
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import VOCAB_SIZE, greedy_answer
from tests.support.run.waiting import HANG_S

PROMPT = list(range(22))
FIRST = greedy_answer(PROMPT, 1)[0]
LONG = list(range(30, 60))


def receive_into(engine: Harness) -> ReceiveInto:
    (message,) = engine.outbox.take()
    assert isinstance(message, ReceiveInto)
    return message


def write(engine: Harness, room: ReceiveInto, prompt: list[int]) -> None:
    """Write the prompt's KV into the blocks of the hold, as the transfer does."""
    size = engine.config.block_size
    for offset, block in enumerate(room.hold.block_ids):
        start = (room.first_index + offset) * size
        for place, token in enumerate(prompt[start : start + size]):
            engine.kv_cache[block, place] = (start + place) * 1024 + token


def park(engine: Harness, request_id: str = "a", prompt: list[int] = PROMPT, **fields: Any) -> ReceiveInto:
    engine.add(prompt, request_id, remote_prefill=True, **fields)
    engine.step()
    return receive_into(engine)


def finish(engine: Harness, room: ReceiveInto, prompt: list[int] = PROMPT) -> None:
    write(engine, room, prompt)
    engine.core.apply(Landed(room.request_id, len(room.hold)))
    engine.core.apply(SourceFinished(room.request_id, len(prompt), tuple(greedy_answer(prompt, 1))))
    engine.core.apply(HoldReturned(room.request_id, room.hold))


def test_what_has_landed_is_decoded_from_the_second_position_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    room = park(engine, params={"max_tokens": 8})
    assert (room.first_index, len(room.hold)) == (0, 6)
    assert not engine.core.has_work
    finish(engine, room)
    answer = engine.run()["a"]
    assert (answer.first_position, answer.token_ids) == (1, greedy_answer(PROMPT, 8)[1:])
    assert engine.model.num_tokens == 7


@pytest.mark.parametrize("order", ["landed", "finished", "returned"])
def test_it_runs_only_when_all_three_are_there_in_any_order(make_engine: MakeEngine, order: str) -> None:
    engine = make_engine()
    room = park(engine)
    write(engine, room, PROMPT)
    events: dict[str, Landed | SourceFinished | HoldReturned] = {
        "landed": Landed("a", 6),
        "finished": SourceFinished("a", 22, (FIRST,)),
        "returned": HoldReturned("a", room.hold),
    }
    last = events.pop(order)
    for event in events.values():
        engine.core.apply(event)
        engine.step()
        assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.core.apply(last)
    assert engine.run()["a"].token_ids == greedy_answer(PROMPT, 4)[1:]


def test_only_what_is_not_cached_is_received(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.ask(PROMPT[:13])
    room = park(engine)
    assert (room.first_index, len(room.hold)) == (3, 3)
    finish(engine, room)
    answer = engine.run()["a"]
    assert (answer.num_cached_tokens, answer.token_ids) == (12, greedy_answer(PROMPT, 4)[1:])
    assert answer.cached_tokens == CachedTokens(pool=12)
    found = engine.core.stats().prompt_tokens_by_source
    assert found == {"pool": 12, "host": 0, "store": 0, "peer": 0, "transfer": 22 - 12, "computed": 13}


def test_a_prompt_that_is_cached_whole_receives_nothing_but_the_first_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(16))
    engine.ask(prompt)
    room = park(engine, prompt=prompt)
    assert (room.first_index, len(room.hold)) == (4, 0)
    computed = engine.model.num_tokens
    engine.core.apply(HoldReturned("a", room.hold))
    engine.core.apply(SourceFinished("a", 16, tuple(greedy_answer(prompt, 1))))
    assert engine.run()["a"].token_ids == greedy_answer(prompt, 4)[1:]
    assert engine.model.num_tokens - computed == 3


def test_i3_nothing_is_cached_before_it_is_verified_and_all_full_blocks_after(make_engine: MakeEngine) -> None:
    engine = make_engine()
    room = park(engine)
    engine.core.apply(Landed("a", 5))
    assert engine.scheduler.pool.find(engine.scheduler.requests["a"].block_hashes[0]) is None
    finish_hashes = engine.scheduler.requests["a"].block_hashes[:]
    write(engine, room, PROMPT)
    engine.core.apply(Landed("a", 6))
    engine.core.apply(SourceFinished("a", 22, (FIRST,)))
    engine.core.apply(HoldReturned("a", room.hold))
    assert all(engine.scheduler.pool.find(value) is not None for value in finish_hashes)
    engine.run()


@pytest.mark.parametrize(("cause", "cached"), [(TransferFailed("x"), 8), (DigestMismatch("x"), 0)])
def test_i3_a_failed_transfer_leaves_its_verified_blocks_unless_the_digests_differ(
    make_engine: MakeEngine, cause: TransferFailed, cached: int
) -> None:
    engine = make_engine()
    room = park(engine)
    write(engine, room, PROMPT[:8])
    engine.core.apply(Landed("a", 2))
    engine.core.apply(ReceiveFailed("a", cause))
    engine.step()
    answer = engine.answers["a"]
    assert (answer.finish_reason, answer.error_code) == (FinishReason.ERROR, cause.code)
    assert engine.outbox.take() == [StopReceiving("a")]
    assert engine.core.stats().num_blocks_quarantined == 6
    engine.core.apply(HoldReturned("a", room.hold))
    assert engine.core.stats().num_blocks_quarantined == 0
    again = engine.ask(PROMPT)
    assert (again.num_cached_tokens, again.token_ids) == (cached, greedy_answer(PROMPT, 4))


def test_i13_blocks_of_an_aborted_receive_are_not_handed_out_before_their_hold_is_back(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12)
    room = park(engine)
    engine.core.abort_request("a")
    assert engine.scheduler.pool.num_in_use == 6
    local = engine.add([9] * 20, params={"max_tokens": 4})
    for _ in range(6):
        engine.step()
        engine.kv_cache[list(room.hold.block_ids)] = 12345
    assert engine.answers[local].token_ids == greedy_answer([9] * 20, 4)
    waits = engine.add([8] * 30)
    engine.step()
    assert engine.running() == []
    engine.core.apply(HoldReturned("a", room.hold))
    assert engine.run()[waits].token_ids == greedy_answer([8] * 30, 4)


def test_a_first_token_that_ends_the_request_ends_it_without_a_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    finish(engine, park(engine, eos=(FIRST,)))
    answer = engine.run()["a"]
    assert (answer.finish_reason, answer.token_ids) == (FinishReason.STOP, [])
    assert engine.model.num_tokens == 0


@pytest.mark.parametrize("event", [SourceFinished("a", 21, (FIRST,)), SourceFinished("a", 22, ())])
def test_i8_a_source_that_computed_another_prompt_fails_the_request(
    make_engine: MakeEngine, event: SourceFinished
) -> None:
    engine = make_engine()
    room = park(engine)
    engine.core.apply(Landed("a", 6))
    engine.core.apply(event)
    engine.core.apply(HoldReturned("a", room.hold))
    engine.step()
    assert engine.answers["a"].error_code == "digest_mismatch"
    assert engine.ask(PROMPT).num_cached_tokens == 0


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31])
def test_i9_a_first_token_outside_the_vocabulary_ends_the_request_and_not_the_engine(
    make_engine: MakeEngine, token: int
) -> None:
    engine = make_engine()
    room = park(engine)
    engine.core.apply(Landed("a", 6))
    engine.core.apply(SourceFinished("a", 22, (token,)))
    engine.core.apply(HoldReturned("a", room.hold))
    engine.run()
    assert engine.answers["a"].error_code == "transfer_failed"


def test_i9_events_that_come_late_twice_or_for_nobody_are_dropped_and_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for event in (
        Landed("nobody", 1),
        SourceFinished("nobody", 1, (1,)),
        ReceiveFailed("nobody", TransferFailed("x")),
    ):
        engine.core.apply(event)
    assert engine.scheduler.num_dropped_events == 3
    engine.add(PROMPT, "a", remote_prefill=True)
    for late in (Landed("a", 1), SourceFinished("a", 22, (FIRST,)), Want("a", 0)):
        engine.core.apply(late)
    assert engine.scheduler.num_dropped_events == 6
    engine.step()
    room = receive_into(engine)
    write(engine, room, PROMPT)
    for event in (
        Landed("a", 4),
        Landed("a", 3),
        Landed("a", 4),
        Landed("a", 7),
        SourceFinished("a", 22, (FIRST,)),
        SourceFinished("a", 22, (FIRST + 1,)),
        SourceFinished("a", 1, (FIRST,)),
    ):
        engine.core.apply(event)
    assert engine.scheduler.num_dropped_events == 11
    engine.core.apply(Landed("a", 6))
    engine.core.apply(HoldReturned("a", room.hold))
    for event in (Landed("a", 6), ReceiveFailed("a", TransferFailed("x"))):
        engine.core.apply(event)
    assert engine.scheduler.num_dropped_events == 13
    assert engine.run()["a"].token_ids == greedy_answer(PROMPT, 4)[1:]


def test_aborting_before_the_reservation_tells_the_transfer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, "a", remote_prefill=True)
    engine.core.abort_request("a")
    engine.step()
    assert engine.outbox.take() == [StopReceiving("a")]
    assert engine.answers["a"].finish_reason is FinishReason.ABORT


def test_a_running_sequence_gets_the_room_of_one_that_still_loads(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48)
    short = list(range(6))
    loads = park(engine, "loads", LONG)
    engine.add(short, "runs", params={"max_tokens": 24})
    engine.step()
    assert sum(engine.scheduler.pool.available) == 2
    while (answer := engine.collect().get("loads")) is None:
        engine.step()
    assert answer.error_code == "evicted"
    assert answer.finish_reason is FinishReason.ERROR
    [stopped] = engine.outbox.take()
    assert stopped == StopReceiving("loads")
    num_tokens = len(engine.answers["runs"].token_ids)
    engine.step()  # its reads may still write: the running sequence waits, and nothing else loses its blocks
    assert len(engine.answers["runs"].token_ids) == num_tokens
    assert engine.scheduler.num_preemptions == 0
    engine.core.apply(HoldReturned("loads", loads.hold))
    assert engine.run()["runs"].token_ids == greedy_answer(short, 24)
    assert engine.scheduler.num_preemptions == 0


def test_what_had_landed_for_an_evicted_sequence_is_found_in_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48)
    loads = park(engine, "loads", LONG)
    engine.add(list(range(6)), "runs", params={"max_tokens": 12})
    engine.step()
    write(engine, loads, LONG)
    engine.core.apply(Landed("loads", 3))
    while "loads" not in engine.collect():
        engine.step()
    engine.core.apply(HoldReturned("loads", loads.hold))
    engine.run()
    engine.outbox.take()
    assert park(engine, "again", LONG).first_index == 3
    engine.core.abort_request("again")
    engine.must_be_idle = False


def test_the_room_of_a_sequence_with_a_higher_priority_is_left_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48, scheduling_policy="priority")
    loads = park(engine, "loads", LONG, priority=0)
    engine.add(list(range(6)), "runs", params={"max_tokens": 24}, priority=1)
    engine.step()
    for _ in range(30):
        engine.step()
    assert "loads" not in engine.collect()
    assert engine.scheduler.num_preemptions == 1
    finish(engine, loads, LONG)
    answers = engine.run()
    assert answers["loads"].token_ids == greedy_answer(LONG, 4)[1:]
    assert answers["runs"].token_ids == greedy_answer(list(range(6)), 24)


def test_room_that_does_not_come_back_is_not_waited_for_without_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.engine.scheduler.waiting.remote_kv_queue.RETURNS_WITHIN_S", 0.05)
    engine = make_engine(num_blocks=12, max_model_len=48)
    loads = park(engine, "loads", LONG[:22])
    engine.add(list(range(6)), "one", params={"max_tokens": 20})
    engine.add(list(range(7)), "two", params={"max_tokens": 20})
    engine.step()
    began = time.monotonic()
    while engine.scheduler.num_preemptions == 0:
        engine.step()
        assert time.monotonic() - began < HANG_S
    assert engine.collect()["loads"].error_code == "evicted"
    engine.core.apply(HoldReturned("loads", loads.hold))
    answers = engine.run()
    assert answers["one"].token_ids == greedy_answer(list(range(6)), 20)
    assert answers["two"].token_ids == greedy_answer(list(range(7)), 20)


@pytest.mark.parametrize("field", ["remote_prefill", "transfer_source"])
def test_an_engine_without_transfers_refuses_the_request_alone(make_engine: MakeEngine, field: str) -> None:
    engine = make_engine(has_transfers=False)
    good = engine.add(PROMPT)
    plain = engine.request(PROMPT, "bad")
    bad = msgspec.structs.replace(plain, **{field: True})
    with pytest.raises(InvalidRequest, match=f"{field} is given, and this engine has no transfers") as caught:
        engine.core.verify(bad)
    assert caught.value.field == field
    engine.submit(bad)  # by a caller that has not called `verify`
    answers = engine.run()
    assert (answers["bad"].error_code, answers["bad"].token_ids) == ("invalid_request", [])
    assert answers["bad"].error_message == caught.value.message
    assert answers[good].token_ids == greedy_answer(PROMPT, 4)
