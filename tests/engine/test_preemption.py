"""Preemption by recompute: same tokens, right victims, nobody starves."""

from __future__ import annotations

import pytest

from pdserve.common.request.engine_types import FinishReason
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.hash_model import greedy_answer


@pytest.mark.parametrize("num_blocks", [9, 10, 12, 15])
def test_preempted_sequences_give_the_same_tokens(make_engine: MakeEngine, num_blocks: int) -> None:
    engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=13)
    prompts = [[n * 5 + i for i in range(3 + 2 * n)] for n in range(6)]
    ids = [engine.add(prompt, params={"max_tokens": 20}) for prompt in prompts]
    answers = engine.run()
    assert engine.scheduler.num_preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert answers[request_id].token_ids == greedy_answer(prompt, 20)


def test_the_victim_is_who_loses_least_and_then_the_newest(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    long = engine.add(list(range(12)), params={"max_tokens": 12})
    old = engine.add([50] * 4, params={"max_tokens": 12})
    new = engine.add([51] * 4, params={"max_tokens": 12})
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    assert engine.running() == [long, old]
    engine.run()
    assert engine.answers[new].token_ids == greedy_answer([51] * 4, 12)


def test_new_work_stays_out_while_a_preempted_sequence_has_no_room(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    first = engine.add([1] * 12, params={"max_tokens": 16})
    second = engine.add([2] * 8, params={"max_tokens": 16})
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    late = engine.add([3])
    while first not in engine.answers or engine.answers[first].finish_reason is None:
        engine.step()
        if engine.answers[first].finish_reason is None:
            assert late not in engine.running()
    engine.run()
    assert engine.answers[second].token_ids == greedy_answer([2] * 8, 16)
    assert engine.answers[late].token_ids == greedy_answer([3], 4)


def test_a_preempted_sequence_says_no_position_twice(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=6, max_model_len=24)
    ids = [engine.add([n] * 5, params={"max_tokens": 12}) for n in range(3)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(len(engine.answers[request_id].token_ids) == 12 for request_id in ids)


def test_a_preempted_sequence_that_may_not_be_recomputed_here_is_evicted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_local_prefill_tokens=6)
    long = engine.add(list(range(12)), params={"max_tokens": 18}, prefill_here=True)
    short = engine.add([50] * 6, params={"max_tokens": 18})
    engine.run()
    assert engine.answers[long].token_ids == greedy_answer(list(range(12)), 18)
    evicted = engine.answers[short]
    assert (evicted.finish_reason, evicted.error_code) == (FinishReason.ERROR, "evicted")
    assert evicted.token_ids == greedy_answer([50] * 6, len(evicted.token_ids))


def test_prefill_here_is_never_evicted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_local_prefill_tokens=6)
    ids = [engine.add([n] * 9, params={"max_tokens": 18}, prefill_here=True) for n in range(2)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.answers[ids[n]].token_ids == greedy_answer([n] * 9, 18) for n in range(2))


def test_what_is_cached_does_not_count_towards_the_cap(make_engine: MakeEngine) -> None:
    engine = make_engine(max_local_prefill_tokens=6)
    prompt = list(range(20))
    refused = engine.ask(prompt)
    assert (refused.error_code, refused.uncached_tokens) == ("needs_prefill", 20)
    assert refused.token_ids == []
    assert engine.ask(prompt, prefill_here=True).token_ids == greedy_answer(prompt, 4)
    assert engine.ask(prompt).token_ids == greedy_answer(prompt, 4)
    assert engine.ask(list(range(1, 7))).token_ids == greedy_answer(list(range(1, 7)), 4)
    assert engine.ask([*prompt, 1, 2, 3, 4, 5, 6, 7]).uncached_tokens == 7


def test_what_waits_is_counted_in_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=9, max_num_batched_tokens=7, max_num_seqs=3)
    ids = [engine.add([n] * (4 + n), params={"max_tokens": 9}) for n in range(7)]
    engine.core.abort_request(ids[5])
    while engine.core.has_work:
        engine.step()
        waiting = [request for queue in engine.scheduler.waiting._queues for request in queue.first(99)]
        expected = sum(request.num_tokens - request.num_computed_tokens for request in waiting)
        assert engine.scheduler.waiting.num_waiting_tokens == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.waiting.num_waiting_tokens == 0


def test_abort_ends_a_request_in_every_state(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_num_batched_tokens=6)
    for num_steps in range(14):
        ids = [engine.add([n] * 9, f"{num_steps}.{n}", params={"max_tokens": 14}) for n in range(3)]
        for _ in range(num_steps):
            engine.step()
        for request_id in ids:
            engine.core.abort_request(request_id)
            engine.core.abort_request(request_id)
        engine.run()
        engine.scheduler.check(idle=True)
        for n, request_id in enumerate(ids):
            answer = engine.answers[request_id]
            assert answer.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            assert answer.token_ids == greedy_answer([n] * 9, len(answer.token_ids))


def test_failing_all_ends_every_request_with_the_cause(make_engine: MakeEngine) -> None:
    from pdserve.common.errors import InternalError

    engine = make_engine(num_blocks=8, max_model_len=32)
    ids = [engine.add([n] * 9, params={"max_tokens": 14}) for n in range(4)]
    ids.append(engine.add([1] * 5, remote_prefill=True))
    engine.step()
    engine.core.fail_all(InternalError("the end"))
    engine.run()
    engine.step()
    for request_id in ids:
        assert (engine.answers[request_id].error_code, engine.answers[request_id].error_message) == (
            "internal_error",
            "the end",
        )
    for message in engine.outbox.take():
        if hasattr(message, "hold"):
            engine.scheduler.holds.back(message.hold)
