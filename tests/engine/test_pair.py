"""Two engines, P and D, coupled by their KV messages: which waits for which, and that no order of events spoils an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.scheduler.kv_messages import Settled
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import greedy_answer, sampled_answer
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle

SAMPLED = {"temperature": 1.0, "seed": 3}


def test_i1_a_request_through_p_and_d_gives_one_engines_answer(make_engine: MakeEngine) -> None:
    pair = Pair(make_engine(max_num_batched_tokens=9), make_engine(max_num_batched_tokens=9))
    prompts = {f"r{n}": [(n * 7 + i) % 60 for i in range(n)] for n in (1, 3, 4, 8, 22, 31)}
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": 9})
        pair.round()
    pair.run()
    for request_id, prompt in prompts.items():
        answer = pair.answer(request_id)
        assert (answer.token_ids, answer.finish_reason) == (greedy_answer(prompt, 9), FinishReason.LENGTH)


def test_i1_a_mixture_of_experts_through_p_and_d_equals_transformers(
    make_real_engine: Callable[..., Harness], tiny_checkpoints: Callable[..., Path]
) -> None:
    folder = tiny_checkpoints("qwen3_moe")
    oracle = Oracle(folder)
    pair = Pair(make_real_engine(folder, max_num_batched_tokens=20), make_real_engine(folder))
    prompts = {f"r{n}": prompt_of(n) for n in (1, 15, 16, 17, 31, 70)}
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": 12})
    pair.run()
    for request_id, prompt in prompts.items():
        oracle.check(prompt, pair.answer(request_id).token_ids)
    assert {name: len(pair.transfers[name].landed) for name in prompts} == {
        name: -(-len(prompt) // 16) for name, prompt in prompts.items()
    }


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_i5_one_transfer_serves_every_sequence(make_engine: MakeEngine, length: int) -> None:
    p, d = make_engine(block_size=16, max_num_batched_tokens=9), make_engine(block_size=16)
    pair = Pair(p, d)
    prompt = [(n * 7 + length) % 60 for n in range(length)]
    pair.add(prompt, "r", n=4, params={"max_tokens": 9} | SAMPLED)
    pair.run()
    answers = [pair.answer("r", index) for index in range(4)]
    assert [a.token_ids for a in answers] == [sampled_answer(prompt, 9, seed=3, index=index) for index in range(4)]
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in answers)
    assert p.model.num_tokens == length
    assert d.model.num_tokens == 4 * 8, "decode computed a part of the prompt"


def test_sequences_that_end_at_the_source_never_begin_at_the_receiver(make_engine: MakeEngine) -> None:
    prompt = list(range(20, 38))
    firsts = [sampled_answer(prompt, 1, seed=3, index=index)[0] for index in range(4)]
    assert firsts[0] not in firsts[1:]
    for stops in ({firsts[0]}, {*firsts[1:]}, {*firsts}):
        p, d = make_engine(), make_engine()
        pair = Pair(p, d)
        params = {"max_tokens": 9, "stop_token_ids": tuple(stops)} | SAMPLED
        pair.add(prompt, "r", n=4, params=params)
        if stops == {*firsts}:
            pair.round()
            assert not p.scheduler.requests, "all have ended, and the source goes on"
            pair.abort("r")
        pair.run()
        for index, first in enumerate(firsts):
            at_source, answer = p.answers[f"r/{index}"], pair.answer("r", index)
            assert at_source.finish_reason is (FinishReason.STOP if first in stops else None)
            if first in stops:
                assert answer.token_ids == [first]
            else:
                assert answer.token_ids == make_engine().ask(prompt, index=index, params=params).token_ids


def test_a_sequence_that_has_ended_before_its_blocks_landed_never_begins(make_engine: MakeEngine) -> None:
    p, d = make_engine(), make_engine()
    pair = Pair(p, d)
    prompt = list(range(18))
    pair.add(prompt, "r", n=3, params={"max_tokens": 9} | SAMPLED)
    pair.round()
    for index in (0, 2):
        d.core.scheduler.end_sequence("r", index)
    pair.run()
    assert pair.answer("r", 1).token_ids == sampled_answer(prompt, 9, seed=3, index=1)
    for index in (0, 2):
        assert pair.answer("r", index).token_ids == sampled_answer(prompt, 1, seed=3, index=index)
        assert pair.answer("r", index).finish_reason is FinishReason.STOP
    assert d.model.num_tokens == 8


def test_the_same_prompt_again_is_cache_on_both_sides(make_engine: MakeEngine) -> None:
    pair = Pair(make_engine(), make_engine())
    prompt = list(range(24))
    for number in range(3):
        pair.add(prompt, f"r{number}")
        pair._step_d()
        pair._deliver()
        pair.run()
        assert pair.answer(f"r{number}").token_ids == greedy_answer(prompt, 4)
    assert pair.d.model.num_tokens == 3 * 3
    assert pair.p.model.num_tokens == 24 + 4 + 4


@pytest.mark.parametrize("small_first", [True, False])
def test_pins_and_reservations_do_not_wait_for_each_other(make_engine: MakeEngine, small_first: bool) -> None:
    # pools of 100, 30 in use on D, requests of 90 and 15: both complete, nothing is prefilled twice
    p = make_engine(num_blocks=100, max_model_len=400, max_num_batched_tokens=40)
    d = make_engine(num_blocks=100, max_model_len=400, max_num_batched_tokens=400)
    pair = Pair(p, d)
    resident = d.add([50] * 119, params={"max_tokens": 20})
    d.step()
    assert d.scheduler.pool.num_in_use == 30
    large, small = [n % 60 for n in range(359)], [n % 7 + 9 for n in range(59)]
    for request_id in ("small", "large") if small_first else ("large", "small"):
        pair.add(small if request_id == "small" else large, request_id, params={"max_tokens": 3})
    pair.run()
    assert pair.answer("large").token_ids == greedy_answer(large, 3)
    assert pair.answer("small").token_ids == greedy_answer(small, 3)
    assert d.answers[resident].token_ids == greedy_answer([50] * 119, 20)
    assert p.model.num_tokens == len(large) + len(small)
    assert p.scheduler.num_preemptions == 0


@pytest.mark.parametrize("room_reused", [False, True])
def test_a_transfer_that_ended_unwanted_is_computed_again_only_if_its_room_was_reused(
    make_engine: MakeEngine, room_reused: bool
) -> None:
    p, d = make_engine(), make_engine(num_blocks=12)
    pair = Pair(p, d)
    blocker = d.add([50] * 30, params={"max_tokens": 12})
    d.step()
    prompt = list(range(22))
    pair.add(prompt, "late")
    for _ in range(3):
        pair.round()
    assert p.answers["late"].transfer_unwanted
    assert p.scheduler.pool.num_in_use == 0
    others = 0
    if room_reused:
        # every free block but the prompt's five full ones, which are the last to be reused
        others = (len(p.scheduler.pool.blocks) - 5) * 4 - 2
        p.add([55] * others, "others", params={"max_tokens": 1})
        p.run()
    pair.run()
    assert pair.answer("late").token_ids == greedy_answer(prompt, 4)
    assert d.answers[blocker].token_ids == greedy_answer([50] * 30, 12)
    assert p.model.num_tokens == others + 22 + (2 if room_reused else 0)


def test_blocks_stay_pinned_from_settled_to_release_whatever_p_does(make_engine: MakeEngine) -> None:
    p, d = make_engine(num_blocks=12, max_num_batched_tokens=8), make_engine()
    pair = Pair(p, d)
    pair.add(list(range(20)), "r")
    pair._step_d()
    pair._deliver()
    for _ in range(3):
        pair._step_p()
    busy = p.add([9] * 20, params={"max_tokens": 8})
    for _ in range(10):
        pair._step_p()
    assert p.answers[busy].token_ids == greedy_answer([9] * 20, 8)
    pair.run()
    assert pair.answer("r").token_ids == greedy_answer(list(range(20)), 4)


def test_settled_is_all_a_source_sends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add([1, 2, 3], "r", transfer_source=True, wanted_from=0)
    engine.run()
    (message,) = engine.outbox.take()
    assert isinstance(message, Settled)
    engine.scheduler.holds.back(message.hold)
