"""The source side of transfers in the engine: publishing, pins, running ahead, and who gives way."""

from __future__ import annotations

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.scheduler.kv_messages import HoldReturned, Revoke, Settled, Want
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer

PROMPT = list(range(22))


def settled(engine: Harness) -> list[tuple[str, int, tuple[int, ...]]]:
    messages = engine.outbox.take()
    published = [message for message in messages if isinstance(message, Settled)]
    assert published == messages
    engine.holds += [message.hold for message in published]
    return [(message.request_id, message.first_index, message.hold.block_ids) for message in published]


def give_back(engine: Harness) -> None:
    for hold in engine.holds:
        engine.core.apply(HoldReturned("whoever", hold))
    engine.holds = []


def add_source(engine: Harness, prompt: list[int], request_id: str, wanted_from: int | None = None) -> None:
    engine.add(prompt, request_id, transfer_source=True, wanted_from=wanted_from, params={"max_tokens": 50})


def test_nothing_is_settled_before_want_and_everything_after(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=9)
    add_source(engine, PROMPT, "a")
    engine.step()
    assert settled(engine) == []
    engine.core.apply(Want("a", 0))
    [table] = engine.scheduler.kv.block_rows(engine.scheduler.requests["a"])
    assert settled(engine) == [("a", 0, tuple(table[:2]))]
    engine.step()
    assert settled(engine) == [("a", 2, tuple(table[2:4]))]
    engine.step()
    assert settled(engine) == [("a", 4, tuple(table[4:6]))]
    answer = engine.answers["a"]
    assert (answer.token_ids, answer.finish_reason, answer.transfer_unwanted) == (greedy_answer(PROMPT, 1), None, False)
    assert engine.scheduler.pool.num_in_use == 6
    give_back(engine)


def test_each_block_is_settled_once_from_where_it_is_wanted(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=5)
    add_source(engine, PROMPT, "a", wanted_from=3)
    engine.run()
    ranges = settled(engine)
    assert [first + offset for _, first, blocks in ranges for offset in range(len(blocks))] == [3, 4, 5]
    give_back(engine)


def test_a_cached_prefix_is_settled_at_admission(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.ask(PROMPT)
    add_source(engine, [*PROMPT[:16], *range(30, 60)], "a", wanted_from=0)
    engine.scheduler.schedule()
    ((_, first, blocks),) = settled(engine)
    assert (first, len(blocks)) == (0, 4)
    engine.core.abort_request("a")
    give_back(engine)


def test_a_transfer_wanted_beyond_its_prompt_settles_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for wanted_from in (6, 7, 10**9):
        add_source(engine, PROMPT, f"a{wanted_from}", wanted_from=wanted_from)
    engine.run()
    assert settled(engine) == []


def test_abort_keeps_pinned_blocks_until_their_holds_are_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=9)
    add_source(engine, PROMPT, "a", wanted_from=0)
    engine.step()
    engine.core.apply(Revoke("a"))
    engine.step()
    assert engine.answers["a"].finish_reason is FinishReason.ABORT
    assert engine.scheduler.pool.num_in_use == 2
    settled(engine)
    give_back(engine)
    engine.core.apply(Revoke("a"))
    assert engine.scheduler.num_dropped_events == 1


def test_i9_events_that_come_late_twice_or_for_nobody_are_dropped_and_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, "local", params={"max_tokens": 2})
    engine.core.apply(Want("nobody", 0))
    engine.core.apply(Want("local", 0))
    add_source(engine, PROMPT, "a")
    engine.core.apply(Want("a", 0))
    engine.core.apply(Want("a", 2))
    engine.run()
    engine.core.apply(Want("a", 0))
    assert engine.scheduler.num_dropped_events == 4
    assert settled(engine)[0][1] == 0
    give_back(engine)


def test_unwanted_transfers_fill_at_most_their_share(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, run_ahead_share=0.5, max_num_batched_tokens=40)
    for name in "abc":
        add_source(engine, [ord(name) % 60] * 18, name)
    engine.step()
    assert (list(engine.answers), engine.running()) == (["a", "b"], [])
    engine.run()
    assert [engine.answers[name].transfer_unwanted for name in "abc"] == [True] * 3
    assert settled(engine) == []


def test_a_transfer_larger_than_the_share_waits_to_be_wanted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, run_ahead_share=0.5)
    add_source(engine, [1] * 44, "large")
    add_source(engine, [2] * 8, "small")
    for _ in range(3):
        engine.step()
    assert "large" not in engine.answers
    assert engine.answers["small"].transfer_unwanted
    engine.core.apply(Want("large", 0))
    engine.run()
    assert engine.answers["large"].token_ids == greedy_answer([1] * 44, 1)
    settled(engine)
    give_back(engine)


def test_wanted_transfers_come_before_unwanted_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=40, max_num_seqs=1)
    add_source(engine, [1] * 8, "first")
    add_source(engine, [2] * 8, "unwanted")
    add_source(engine, [3] * 8, "wanted")
    engine.core.apply(Want("wanted", 0))
    engine.run()
    assert list(engine.answers) == ["wanted", "first", "unwanted"]
    settled(engine)
    give_back(engine)


def test_an_unwanted_transfer_gives_way_to_a_wanted_one_in_the_same_step(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, run_ahead_share=0.5, max_num_batched_tokens=30)
    add_source(engine, [1] * 38, "unwanted")
    engine.step()
    assert engine.running() == ["unwanted"]
    add_source(engine, [2] * 60, "wanted", wanted_from=0)
    engine.step()
    assert engine.running() == ["wanted"]
    for _ in range(200):
        if not engine.core.has_work:
            break
        engine.step()
        settled(engine)
        if "wanted" in engine.answers:
            give_back(engine)
    assert engine.answers["wanted"].token_ids == greedy_answer([2] * 60, 1)
    assert engine.answers["unwanted"].token_ids == greedy_answer([1] * 38, 1)
    assert engine.scheduler.num_preemptions == 1


def test_a_preempted_transfer_that_becomes_wanted_runs_as_wanted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=20, run_ahead_share=0.5, max_num_batched_tokens=25)
    add_source(engine, [1] * 38, "first")
    engine.step()
    add_source(engine, [2] * 60, "second", wanted_from=0)
    engine.step()
    engine.core.apply(Want("first", 0))
    engine.step()
    assert engine.running() == ["second"]
    while "second" not in engine.answers:
        engine.step()
    settled(engine)
    give_back(engine)
    engine.run()
    assert engine.answers["first"].token_ids == greedy_answer([1] * 38, 1)
    assert not engine.answers["first"].transfer_unwanted
    settled(engine)
    give_back(engine)


def test_a_wanted_transfer_is_never_a_victim(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=9, max_num_batched_tokens=3)
    local = engine.add([5] * 6, params={"max_tokens": 20})
    while local not in engine.answers:
        engine.step()
    add_source(engine, [6] * 28, "pinned", wanted_from=0)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    pinned = engine.scheduler.requests["pinned"]
    assert pinned.num_computed_tokens < engine.scheduler.requests[local].num_tokens
    assert engine.running() == ["pinned"]
    while "pinned" not in engine.answers:
        engine.step()
    settled(engine)
    give_back(engine)
    assert engine.run()[local].token_ids == greedy_answer([5] * 6, 20)
    assert pinned.num_preemptions == 0


def test_unwanted_transfers_are_the_first_victims_however_much_they_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=9, run_ahead_share=1.0, max_num_batched_tokens=8)
    local = engine.add([5] * 6, params={"max_tokens": 20})
    engine.step()
    add_source(engine, [6] * 28, "unwanted")
    unwanted = engine.scheduler.requests["unwanted"]
    computed = 0
    while engine.scheduler.num_preemptions == 0:
        computed = unwanted.num_computed_tokens
        engine.step()
    assert computed > engine.scheduler.requests[local].num_computed_tokens
    assert engine.running() == [local]
    answers = engine.run()
    assert answers[local].token_ids == greedy_answer([5] * 6, 20)
    assert answers["unwanted"].token_ids == greedy_answer([6] * 28, 1)


@pytest.mark.parametrize("wanted", [False, True])
def test_local_work_does_not_pass_a_wanted_transfer_that_has_no_room(make_engine: MakeEngine, wanted: bool) -> None:
    engine = make_engine(num_blocks=20, max_num_batched_tokens=64)
    add_source(engine, [1] * 40, "pins", wanted_from=0)
    engine.run()
    settled(engine)
    add_source(engine, [2] * 60, "large", wanted_from=0 if wanted else None)
    local = engine.add([3] * 5)
    engine.step()
    assert (local in engine.answers) is not wanted
    give_back(engine)
    if not wanted:
        engine.core.apply(Want("large", 0))
    engine.run()
    settled(engine)
    give_back(engine)


def test_a_source_ends_with_its_first_token_when_that_ends_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = greedy_answer(PROMPT, 1)[0]
    engine.add(PROMPT, "stops", transfer_source=True, wanted_from=0, eos=(first,))
    engine.add(PROMPT, "one", transfer_source=True, wanted_from=0, params={"max_tokens": 1})
    answers = engine.run()
    assert (answers["stops"].token_ids, answers["stops"].finish_reason) == ([first], FinishReason.STOP)
    assert (answers["one"].token_ids, answers["one"].finish_reason) == ([first], FinishReason.LENGTH)
    settled(engine)
    give_back(engine)
