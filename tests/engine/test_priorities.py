"""Scheduling by priority: who runs first, who passes whom, and who loses its blocks."""

from __future__ import annotations

import pytest

from pdserve.engine.scheduler.kv_messages import HoldReturned, ReceiveInto, Settled
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer


def order_of_ends(engine: Harness) -> list[str]:
    ends: list[str] = []
    while engine.core.has_work:
        engine.step()
        ends += [
            name for name, answer in engine.answers.items() if answer.finish_reason is not None and name not in ends
        ]
    return ends


def test_lower_values_run_first_and_equals_in_order_of_arrival(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("d", 5), ("b", -1), ("a", -7), ("c", -1), ("e", 5)):
        engine.add([1, 2, 3], name, priority=priority)
    assert order_of_ends(engine) == list("abcde")
    assert all(answer.token_ids == greedy_answer([1, 2, 3], 4) for answer in engine.answers.values())


def test_first_come_first_served_knows_no_priority(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", -1), ("c", -7)):
        engine.add([1, 2, 3], name, priority=priority)
    assert order_of_ends(engine) == list("abc")


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 0), ("priority", 5)])
def test_all_sequences_of_a_request_have_its_priority(make_engine: MakeEngine, policy: str, expected: int) -> None:
    engine = make_engine(scheduling_policy=policy)
    engine.add([1, 2, 3], n=3, priority=5, params={"temperature": 1.0, "seed": 1})
    engine.step()
    assert [request.priority for request in engine.scheduler.requests.values()] == [expected] * 3
    engine.run()


def test_prompts_are_computed_by_priority(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=8, scheduling_policy="priority")
    engine.add([1] * 30, "low", priority=3, params={"max_tokens": 1})
    engine.step()
    engine.step()
    engine.add([2] * 4, "short", priority=0, params={"max_tokens": 1})
    engine.step()
    assert "short" not in engine.answers, "what has begun uses the step up: nobody is preempted for a place"
    assert order_of_ends(engine) == ["low", "short"]
    engine = make_engine(max_num_batched_tokens=8, long_prefill_token_threshold=4, scheduling_policy="priority")
    engine.add([1] * 30, "low", priority=3, params={"max_tokens": 1})
    engine.step()
    engine.add([2] * 30, "high", priority=0, params={"max_tokens": 1})
    engine.add([3] * 30, "middle", priority=1, params={"max_tokens": 1})
    assert order_of_ends(engine) == ["low", "high", "middle"]


@pytest.mark.parametrize(("policy", "victim"), [("priority", "large"), ("fcfs", "small")])
def test_the_victim_has_the_lowest_priority_then_the_least_to_lose(
    make_engine: MakeEngine, policy: str, victim: str
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, scheduling_policy=policy)
    engine.add([1] * 12, "large", priority=1, params={"max_tokens": 12})
    engine.add([2] * 4, "old", priority=0, params={"max_tokens": 12})
    engine.add([3] * 4, "small", priority=0, params={"max_tokens": 12})
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert {"large", "old", "small"} - set(engine.running()) == {victim}
    answers = engine.run()
    for name, prompt in (("large", [1] * 12), ("old", [2] * 4), ("small", [3] * 4)):
        assert answers[name].token_ids == greedy_answer(prompt, 12)


def test_among_victims_of_one_priority_the_newest_of_those_who_lose_least(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, scheduling_policy="priority")
    engine.add([1] * 4, "high", priority=-1, params={"max_tokens": 20})
    for name, prompt in (("more", [2] * 8), ("old", [3] * 4), ("new", [4] * 4)):
        engine.add(prompt, name, priority=2, params={"max_tokens": 12})
    victims: list[str] = []
    while engine.core.has_work and len(victims) < 2:
        before = engine.running()
        engine.step()
        victims += [name for name in before if name not in engine.running() and name in engine.scheduler.requests]
    assert victims[0] == "new"
    engine.run()
    assert engine.answers["high"].token_ids == greedy_answer([1] * 4, 20)


def test_better_work_passes_a_preempted_sequence_and_equal_work_does_not(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, scheduling_policy="priority")
    engine.add([1] * 12, "first", priority=1, params={"max_tokens": 16})
    engine.add([2] * 8, "second", priority=1, params={"max_tokens": 16})
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    engine.add([3], "equal", priority=1)
    engine.add([4], "better", priority=0)
    engine.step()
    assert "better" in engine.running()
    assert "equal" not in engine.running()
    engine.run()
    assert engine.answers["better"].token_ids == greedy_answer([4], 4)
    assert engine.answers["second"].token_ids == greedy_answer([2] * 8, 16)


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
@pytest.mark.parametrize("remote", [False, True])
def test_equals_go_by_the_time_of_their_arrival(make_engine: MakeEngine, policy: str, remote: bool) -> None:
    """As in vLLM, whose fcfs queue is in the order of submission."""
    engine = make_engine(max_num_seqs=1, num_blocks=12, scheduling_policy=policy)
    engine.add([9] * 4, "first", params={"max_tokens": 2})
    engine.step()
    kept = sum(engine.scheduler.pool.available)
    times = {"late": 30.0, "early": 10.0, "middle": 20.0, "better": 40.0, "again": 20.0}
    for number, (name, arrival_time) in enumerate(times.items()):
        prompt = [number + 1] * (4 * (kept - 2) if remote else 4)
        priority = -1 if name == "better" and policy == "priority" else 0
        engine.add(prompt, name, priority=priority, arrival_time=arrival_time, remote_prefill=remote)
    expected = ["better", "early", "middle", "again", "late"] if policy == "priority" else [*times]
    if not remote:
        assert order_of_ends(engine) == ["first", *expected]
        return
    places: list[str] = []
    while len(places) < len(times):
        engine.step()
        for room in engine.outbox.take():
            if isinstance(room, ReceiveInto):
                places.append(room.request_id)
                engine.core.abort_request(room.request_id)
                engine.core.apply(HoldReturned(room.request_id, room.hold))
    assert places == expected


def test_room_for_remote_requests_goes_by_priority_too(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=10, scheduling_policy="priority")
    engine.add([1] * 20, "holds", remote_prefill=True)
    engine.step()
    engine.add([2] * 20, "low", priority=2, remote_prefill=True)
    engine.add([3] * 24, "high", priority=-2, remote_prefill=True)
    engine.step()
    rooms = [message for message in engine.outbox.take() if isinstance(message, ReceiveInto)]
    assert [room.request_id for room in rooms] == ["holds"]
    engine.core.abort_request("holds")
    engine.core.apply(HoldReturned("holds", rooms[0].hold))
    engine.step()
    rooms = [message for message in engine.outbox.take() if isinstance(message, ReceiveInto)]
    assert [room.request_id for room in rooms] == ["high"]
    for name in ("low", "high"):
        engine.core.abort_request(name)
    engine.core.apply(HoldReturned("high", rooms[0].hold))


def test_priority_goes_before_the_kind_of_work(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    engine.add([1] * 6, "unwanted", priority=-2, transfer_source=True)
    engine.add([2] * 6, "wanted", priority=5, transfer_source=True, wanted_from=0)
    engine.add([3] * 6, "local", priority=0, params={"max_tokens": 1})
    engine.run()
    assert list(engine.answers) == ["unwanted", "local", "wanted"]
    give_back(engine)


def test_a_transfer_that_gives_way_in_the_step_in_which_it_came_leaves_no_trace(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, max_num_batched_tokens=64, scheduling_policy="priority")
    engine.add([1] * 38, "unwanted", priority=-1, transfer_source=True)
    engine.add([2] * 60, "wanted", priority=0, transfer_source=True, wanted_from=0)
    engine.step()
    assert engine.running() == []
    assert list(engine.answers) == ["wanted"]
    assert engine.scheduler.num_preemptions == 1
    give_back(engine)
    engine.run()
    assert engine.answers["unwanted"].token_ids == greedy_answer([1] * 38, 1)
    last = engine.add([5])
    engine.run()
    # the runner hears of who has left with the next step
    batch = engine.runner.batch
    assert list(batch.rows) == [last]
    assert len(batch._free_rows) == engine.config.max_num_seqs - 1


def give_back(engine: Harness) -> None:
    for message in engine.outbox.take():
        assert isinstance(message, Settled)
        engine.core.apply(HoldReturned(message.request_id, message.hold))
