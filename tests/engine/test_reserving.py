"""The order in which requests get room on the receiving side, and those that must not wait for each other."""

from __future__ import annotations

from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, ReceiveInto, SourceFinished
from tests.support.engine_harness import Harness, MakeEngine
from tests.support.hash_model import greedy_answer


def rooms(engine: Harness) -> dict[str, ReceiveInto]:
    return {message.request_id: message for message in engine.outbox.take() if isinstance(message, ReceiveInto)}


def land(engine: Harness, room: ReceiveInto, prompt: list[int]) -> None:
    size = engine.config.block_size
    for offset, block in enumerate(room.hold.block_ids):
        start = (room.first_index + offset) * size
        for place, token in enumerate(prompt[start : start + size]):
            engine.kv_cache[block, place] = (start + place) * 1024 + token
    engine.core.apply(Landed(room.request_id, len(room.hold)))
    engine.core.apply(SourceFinished(room.request_id, len(prompt), tuple(greedy_answer(prompt, 1))))
    engine.core.apply(HoldReturned(room.request_id, room.hold))


def test_a_request_that_cannot_reserve_is_passed_by_those_behind_it(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20)
    engine.add([1] * 60, "first", remote_prefill=True)
    engine.step()
    first = rooms(engine)["first"]
    engine.add([2] * 70, "large", remote_prefill=True)
    engine.add([3] * 8, "small", remote_prefill=True)
    engine.step()
    small = rooms(engine)
    assert set(small) == {"small"}
    land(engine, small["small"], [3] * 8)
    for _ in range(6):
        engine.step()
    assert engine.answers["small"].token_ids == greedy_answer([3] * 8, 4)[1:]
    land(engine, first, [1] * 60)
    while "large" not in (found := rooms(engine)):
        engine.step()
    land(engine, found["large"], [2] * 70)
    assert engine.run()["large"].token_ids == greedy_answer([2] * 70, 4)[1:]


def test_only_so_many_are_passed_over_in_one_step(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, look_ahead=2)
    engine.add([1] * 60, "first", remote_prefill=True)
    engine.step()
    first = rooms(engine)["first"]
    for number in range(3):
        engine.add([2] * 70, f"large{number}", remote_prefill=True)
    engine.add([3] * 4, "small", remote_prefill=True)
    engine.step()
    assert rooms(engine) == {}
    engine.core.abort_request("large1")
    engine.step()
    found = rooms(engine)
    assert set(found) == {"small"}
    for request_id in ("first", "large0", "large2", "small"):
        engine.core.abort_request(request_id)
    for room in (first, found["small"]):
        engine.core.apply(HoldReturned(room.request_id, room.hold))


def test_a_block_is_kept_free_for_every_sequence_that_will_grow(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12)
    running = engine.add([1] * 4, params={"max_tokens": 8})
    engine.step()
    engine.add([2] * 16, "parked", remote_prefill=True)
    engine.step()
    parked = rooms(engine)["parked"]
    free = engine.scheduler.pool.num_available
    engine.add([3] * 4 * (free - 1), "no", remote_prefill=True)
    engine.step()
    assert rooms(engine) == {}
    engine.core.abort_request("no")
    engine.add([3] * 4 * (free - 2), "yes", remote_prefill=True)
    engine.step()
    yes = rooms(engine)["yes"]
    assert engine.scheduler.pool.num_available == 2
    land(engine, parked, [2] * 16)
    land(engine, yes, [3] * 4 * (free - 2))
    answers = engine.run()
    assert answers[running].token_ids == greedy_answer([1] * 4, 8)
    assert answers["parked"].token_ids == greedy_answer([2] * 16, 4)[1:]


def test_a_ready_sequence_is_not_starved_by_a_preempted_one_that_has_no_room(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=14, max_num_seqs=2)
    engine.add([2] * 8, "ready", remote_prefill=True, params={"max_tokens": 6})
    engine.step()
    room = rooms(engine)["ready"]
    large = engine.add([1] * 22, params={"max_tokens": 26})
    other = engine.add([4] * 6, params={"max_tokens": 26})
    engine.step()
    land(engine, room, [2] * 8)
    while engine.scheduler.num_preemptions == 0:
        assert "ready" not in engine.running(), "the batch is full"
        engine.step()
    assert engine.scheduler.waiting.num_preempted == 1
    engine.step()
    assert "ready" in engine.running()
    answers = engine.run()
    assert answers["ready"].token_ids == greedy_answer([2] * 8, 6)[1:]
    assert answers[large].token_ids == greedy_answer([1] * 22, 26)
    assert answers[other].token_ids == greedy_answer([4] * 6, 26)


def test_nothing_is_reserved_while_a_preempted_sequence_has_no_room(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=10, max_model_len=40)
    first = engine.add([1] * 12, params={"max_tokens": 24})
    second = engine.add([4] * 12, params={"max_tokens": 24})
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    engine.add([5] * 4, "late", remote_prefill=True)
    while engine.scheduler.waiting.num_preempted:
        engine.step()
        if engine.scheduler.waiting.num_preempted:
            assert rooms(engine) == {}
    while "late" not in (found := rooms(engine)):
        engine.step()
    land(engine, found["late"], [5] * 4)
    answers = engine.run()
    assert answers[first].token_ids == greedy_answer([1] * 12, 24)
    assert answers[second].token_ids == greedy_answer([4] * 12, 24)
