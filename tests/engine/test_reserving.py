"""The order in which requests get room on the receiving side, and those that must not wait for each other."""

from __future__ import annotations

import pytest

from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, ReceiveInto, SourceFinished
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer


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
    free = sum(engine.scheduler.pool.available)
    # each of the two takes one more block, and so will this one
    engine.add([3] * 4 * (free - 2), "no", remote_prefill=True)
    engine.step()
    assert rooms(engine) == {}
    engine.core.abort_request("no")
    engine.add([3] * 4 * (free - 3), "yes", remote_prefill=True)
    engine.step()
    yes = rooms(engine)["yes"]
    assert sum(engine.scheduler.pool.available) == 3
    land(engine, parked, [2] * 16)
    land(engine, yes, [3] * 4 * (free - 3))
    answers = engine.run()
    assert engine.scheduler.num_preemptions == 0
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


GROWING = [
    # tokens of the stream's prompt and output, of the second's
    (6, 10, 11, 5),
    (6, 10, 16, 2),
    (9, 12, 8, 4),
    (3, 18, 12, 4),
    (1, 25, 4, 9),
    (12, 8, 12, 5),
]


@pytest.mark.diagonal
@pytest.mark.parametrize(("prompt", "output", "second_prompt", "second_output"), GROWING)
@pytest.mark.parametrize("delay", [0, 3, 100])
def test_a_second_request_waits_where_both_cannot_grow(
    make_engine: MakeEngine, prompt: int, output: int, second_prompt: int, second_output: int, delay: int
) -> None:
    """It holds nothing meanwhile, and nothing is preempted or evicted, however long its KV takes."""
    engine = make_engine(num_blocks=7, max_model_len=28)
    engine.add([1] * prompt, "stream", params={"max_tokens": output})
    engine.step()
    engine.add([2] * second_prompt, "second", remote_prefill=True, params={"max_tokens": second_output})
    pool, num_waited = engine.scheduler.pool, 0
    while "second" not in (found := rooms(engine)):
        stream = engine.scheduler.requests.get("stream")
        held = 0 if stream is None else sum(map(len, engine.scheduler.kv.block_rows(stream)))
        assert pool.num_in_use == held, "the second one holds nothing"
        num_waited += 1
        engine.step()
    assert num_waited > 1
    for _ in range(delay):
        engine.step()
    land(engine, found["second"], [2] * second_prompt)
    answers = engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert answers["stream"].token_ids == greedy_answer([1] * prompt, output)
    assert answers["second"].token_ids == greedy_answer([2] * second_prompt, second_output)[1:]


@pytest.mark.parametrize("num_blocks", range(14, 24, 2))
@pytest.mark.parametrize("n", [1, 2])
def test_what_is_placed_keeps_its_blocks_with_several_groups(make_engine: MakeEngine, num_blocks: int, n: int) -> None:
    engine = make_engine(
        num_blocks=num_blocks, sliding_window=(None, 8, None), max_num_batched_tokens=8, max_model_len=16
    )
    engine.add([1] * 3, "stream", params={"max_tokens": 9})
    engine.step()
    engine.add([2] * 6, "second", remote_prefill=True, n=n, params={"max_tokens": 6, "temperature": 1.0, "seed": 1})
    found: dict[str, ReceiveInto] = {}
    while "stream" in engine.running():
        engine.step()
        found |= rooms(engine)
    assert engine.scheduler.num_preemptions == 0
    assert "second" not in engine.collect()
    engine.step()
    found |= rooms(engine)
    engine.core.abort_request("second")
    engine.core.apply(HoldReturned("second", found["second"].hold))


def test_a_request_alone_is_placed_at_once_whatever_it_may_become(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=7, max_model_len=28)
    engine.add([2] * 27, "alone", remote_prefill=True, params={"max_tokens": 1})
    engine.step()
    land(engine, rooms(engine)["alone"], [2] * 27)
    assert engine.run()["alone"].token_ids == []
    assert engine.scheduler.num_preemptions == 0


def test_several_wait_and_come_one_after_the_other(make_engine: MakeEngine) -> None:
    """A hit in the prefix cache changes nothing about the room to grow; small ones may pass."""
    engine = make_engine(num_blocks=7, max_model_len=28)
    engine.ask([2] * 8, params={"max_tokens": 1})
    engine.add([1] * 5, "stream", params={"max_tokens": 12})
    engine.step()
    prompts = {"hit": [2] * 8 + [3] * 4, "large": [4] * 12, "small": [5] * 2}
    for name, prompt in prompts.items():
        engine.add(prompt, name, remote_prefill=True, params={"max_tokens": 2 if name == "small" else 8})
    placed: list[str] = []
    for _ in range(200):
        engine.step()
        for name, room in rooms(engine).items():
            placed.append(name)
            land(engine, room, prompts[name])
        if len(placed) == len(prompts):
            break
    answers = engine.run()
    assert placed[0] == "small"
    assert sorted(placed) == sorted(prompts)
    assert engine.scheduler.num_preemptions == 0
    assert answers["hit"].token_ids == greedy_answer(prompts["hit"], 8)[1:]
    assert answers["large"].token_ids == greedy_answer(prompts["large"], 8)[1:]


def test_what_waits_for_room_is_not_passed_without_end(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=7, max_model_len=28, max_overtakes=3)
    engine.add([1] * 4, "stream", params={"max_tokens": 20})
    engine.step()
    engine.add([2] * 16, "waits", remote_prefill=True, params={"max_tokens": 4})
    placed: list[str] = []
    for number in range(60):
        engine.add([3], f"small{number}", params={"max_tokens": 2})
        engine.step()
        if "waits" in (found := rooms(engine)):
            placed.append("waits")
            land(engine, found["waits"], [2] * 16)
            break
    assert placed == ["waits"]
    assert engine.run()["waits"].token_ids == greedy_answer([2] * 16, 4)[1:]
