"""One prompt, n sequences: computed once, shared block by block, and each what it would be alone (I5)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.scheduler.kv_messages import Settled
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer, prompt_of, sampled_answer
from tests.support.models.oracle import Oracle

SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 9}


def alone(make_engine: MakeEngine, prompt: list[int], index: int, params: dict[str, Any]) -> Answer:
    return make_engine(block_size=16, num_blocks=16).ask(prompt, index=index, params=params)


@pytest.mark.few(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 40])
@pytest.mark.parametrize("budget", [5, 64])
def test_i5_each_sequence_is_what_it_would_be_alone(make_engine: MakeEngine, length: int, budget: int) -> None:
    engine = make_engine(block_size=16, num_blocks=32, max_num_batched_tokens=budget)
    prompt = prompt_of(length)
    answers = engine.ask_many(prompt, 5, params=SAMPLED)
    expected = [sampled_answer(prompt, 9, seed=11, index=index) for index in range(5)]
    assert [answer.token_ids for answer in answers] == expected
    assert len({*map(tuple, expected)}) == 5
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in answers)
    assert all(answer.num_cached_tokens == 0 for answer in answers)
    assert engine.model.num_tokens == length + 5 * 8, "something was computed twice"


def test_sequence_0_is_what_one_sequence_is(make_engine: MakeEngine) -> None:
    prompt = prompt_of(21)
    assert make_engine().ask_many(prompt, 3, params=SAMPLED)[0].token_ids == make_engine().ask(
        prompt, params=SAMPLED
    ).token_ids  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("params", [
    {"repetition_penalty": 1.7}, {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"min_tokens": 6, "stop_token_ids": tuple(range(40))}, {"logit_bias": {3: 4.0}},
    {"bad_words_token_ids": ((5,), (6, 7))}, {"top_k": 4, "top_p": 0.8, "min_p": 0.05}, {"logprobs": 3},
    {"bad_words": ("aa", "cb")},
])  # fmt: skip
def test_every_parameter_counts_for_each_sequence_alone(make_engine: MakeEngine, params: dict[str, Any]) -> None:
    prompt = prompt_of(19)
    together = make_engine(block_size=16).ask_many(prompt, 4, params=SAMPLED | params)
    for index, answer in enumerate(together):
        by_itself = alone(make_engine, prompt, index, SAMPLED | params)
        assert (answer.token_ids, answer.finish_reason) == (by_itself.token_ids, by_itself.finish_reason)
        assert answer.logprobs == by_itself.logprobs


@pytest.mark.parametrize(("length", "after_fork", "after_step"), [(40, 2 + 4, 2 + 4), (32, 2 + 3, 2 + 4), (7, 4, 4)])
def test_full_blocks_are_shared_and_the_partial_one_is_each_ones_own(
    make_engine: MakeEngine, length: int, after_fork: int, after_step: int
) -> None:
    engine = make_engine(block_size=16, num_blocks=16)
    engine.add(prompt_of(length), n=4, params=SAMPLED)
    engine.step()
    assert engine.scheduler.pool.num_in_use == after_fork
    engine.step()
    assert engine.scheduler.pool.num_in_use == after_step
    assert len(engine.running()) == 4
    engine.run()


@pytest.mark.slow
def test_greedy_sequences_are_all_transformers_own(
    make_real_engine: Callable[..., Harness], tiny_checkpoints: Callable[..., Path]
) -> None:
    folder = tiny_checkpoints("qwen3")
    oracle, engine = Oracle(folder), make_real_engine(folder, max_num_batched_tokens=16)
    for length in (15, 16, 17, 40):
        prompt = [3 + (place * place + length) % 250 for place in range(length)]
        for answer in engine.ask_many(prompt, 3, params={"max_tokens": 20}):
            oracle.check(prompt, answer.token_ids)


def test_a_sequence_that_ends_with_its_first_token_takes_no_part(make_engine: MakeEngine) -> None:
    prompt = prompt_of(18)
    firsts = [sampled_answer(prompt, 1, seed=11, index=index)[0] for index in range(6)]
    for stops in ({firsts[0]}, {firsts[2]}, {firsts[0], firsts[5]}, {*firsts}):
        engine = make_engine(block_size=16)
        answers = engine.ask_many(prompt, 6, params=SAMPLED | {"stop_token_ids": tuple(stops)})
        for index, answer in enumerate(answers):
            if firsts[index] in stops:
                assert (answer.token_ids, answer.stop_reason) == ([firsts[index]], firsts[index])
            else:
                by_itself = alone(make_engine, prompt, index, SAMPLED | {"stop_token_ids": tuple(stops)})
                assert answer.token_ids == by_itself.token_ids


def test_one_token_each_forks_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(block_size=16)
    prompt = prompt_of(18)
    answers = engine.ask_many(prompt, 6, params=SAMPLED | {"max_tokens": 1})
    assert [a.token_ids for a in answers] == [sampled_answer(prompt, 1, seed=11, index=index) for index in range(6)]
    assert engine.model.num_tokens == 18


@pytest.mark.few(2)
@pytest.mark.parametrize("num_blocks", [8, 9, 11, 14, 15, 16])
def test_preemption_takes_one_sequence_and_computes_only_its_own_again(
    make_engine: MakeEngine, num_blocks: int
) -> None:
    # four full blocks are shared, and each sequence comes to four of its own
    engine = make_engine(num_blocks=num_blocks, max_model_len=32)
    prompt = prompt_of(17)
    answers = engine.ask_many(prompt, 3, params=SAMPLED | {"max_tokens": 14})
    expected = [sampled_answer(prompt, 14, seed=11, index=index) for index in range(3)]
    assert [answer.token_ids for answer in answers] == expected
    recomputed = engine.model.num_tokens - 17 - 3 * 13
    num_preemptions = engine.scheduler.num_preemptions
    assert (num_preemptions == 0) == (num_blocks == 16)
    if num_blocks == 15:
        assert num_preemptions == 1
    if num_blocks >= 11:  # others hold the shared blocks all the while
        assert recomputed <= num_preemptions * (17 + 14 - 16)


def test_a_fork_that_finds_no_block_is_computed_from_the_shared_prompt(make_engine: MakeEngine) -> None:
    # the prompt takes five of six blocks: one fork gets a copy of the last, the other has to wait
    engine = make_engine(num_blocks=6, max_model_len=24)
    prompt = prompt_of(18)
    answers = engine.ask_many(prompt, 3, params=SAMPLED | {"max_tokens": 3})
    assert [a.token_ids for a in answers] == [sampled_answer(prompt, 3, seed=11, index=i) for i in range(3)]
    assert engine.scheduler.num_preemptions > 0
    assert engine.model.num_tokens == 18 + 2 * 3 + 2, "a fork computes no more than the prompt's tail again"


def test_sequences_take_seats_as_they_become_free(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=4)
    others = [engine.add([n] * 5, params={"max_tokens": 6 + n}) for n in range(3)]
    engine.step()
    request_id = engine.add(prompt_of(9), n=4, params=SAMPLED)
    while engine.core.has_work:
        engine.step()
        assert len(engine.running()) <= 4
    answers = engine.collect()
    for index in range(4):
        assert answers[f"{request_id}/{index}"].token_ids == sampled_answer(prompt_of(9), 9, seed=11, index=index)
    assert [answers[other].token_ids for other in others] == [greedy_answer([n] * 5, 6 + n) for n in range(3)]


def test_more_sequences_than_run_at_a_time_are_refused_by_name(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=4)
    with pytest.raises(InvalidRequest, match=r"n is 5, at most 4 .*max_num_seqs") as refused:
        engine.request([1], n=5)
    assert refused.value.field == "n"
    engine.request([1], n=5, transfer_source=True)


def test_a_prompt_beside_others_comes_in_only_with_room_for_its_forks(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, max_model_len=64)
    engine.add([50] * 30, "other", params={"max_tokens": 3})
    engine.step()
    # 8 blocks are left: 5 for the prompt, 1 for the other's growth; 3 further sequences do not fit any more
    engine.add(prompt_of(18), "wide", n=4, params=SAMPLED)
    engine.step()
    assert engine.running() == ["other"]
    answers = engine.run()
    assert [answers[f"wide/{i}"].token_ids for i in range(4)] == [
        sampled_answer(prompt_of(18), 9, seed=11, index=i) for i in range(4)
    ]


@pytest.mark.parametrize("num_steps", range(7))
def test_an_abort_ends_all_sequences_in_any_state(make_engine: MakeEngine, num_steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=3)
    request_id = engine.add(prompt_of(18), n=3, params=SAMPLED)
    for _ in range(num_steps):
        engine.step()
    ended = engine.core.abort_request(request_id)
    assert ended is not None
    assert not engine.scheduler.requests
    answers = engine.collect()
    assert [answers[f"{request_id}/{i}"].finish_reason for i in range(3)] == [FinishReason.ABORT] * 3
    assert engine.scheduler.pool.num_in_use == 0
    assert engine.core.abort_request(request_id) is None
    engine.step()


@pytest.mark.few(7)
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("num_steps", [3, 4, 6])
def test_one_sequence_ends_and_the_others_go_on(make_engine: MakeEngine, index: int, num_steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=8)
    request_id = engine.add(prompt_of(18), n=3, params=SAMPLED)
    for _ in range(num_steps):
        engine.step()
    engine.core.scheduler.end_sequence(request_id, index)
    engine.core.scheduler.end_sequence(request_id, index)
    engine.core.scheduler.end_sequence(request_id, 17)
    engine.core.scheduler.end_sequence("nobody", 0)
    answers = engine.run()
    for other in range(3):
        answer, expected = answers[f"{request_id}/{other}"], sampled_answer(prompt_of(18), 9, seed=11, index=other)
        if other == index:
            assert answer.finish_reason is FinishReason.STOP
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert len(answer.token_ids) == num_steps - 2
        else:
            assert answer.token_ids == expected


def test_a_second_request_of_a_living_ones_name_is_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.add(prompt_of(9), n=2, params=SAMPLED)
    engine.step()
    engine.core.scheduler.end_sequence(request_id, 0)
    engine.core.add_request(engine.request([1, 2], request_id))
    assert engine.scheduler.num_dropped_events == 1
    assert engine.run()[f"{request_id}/1"].token_ids == sampled_answer(prompt_of(9), 9, seed=11, index=1)


def test_rules_that_leave_no_token_end_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SAMPLED | {"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 2}
    answers = engine.ask_many(prompt_of(9), 3, params=params)
    assert all(answer.error_code == "invalid_request" for answer in answers)


def test_a_source_samples_every_first_token_and_forks_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = prompt_of(18)
    engine.add(prompt, "r", n=4, transfer_source=True, wanted_from=0, params=SAMPLED)
    engine.run()
    firsts = [engine.answers[f"r/{index}"].token_ids for index in range(4)]
    assert firsts == [sampled_answer(prompt, 1, seed=11, index=index) for index in range(4)]
    assert engine.model.num_tokens == 18
    for message in engine.outbox.take():
        assert isinstance(message, Settled)
        engine.scheduler.holds.back(message.hold)


def scripted(make_engine: MakeEngine, seed: int) -> None:
    """Requests of random widths in a small pool, some aborted, some sequences ended from outside."""
    draw = random.Random(seed)
    engine = make_engine(
        num_blocks=draw.choice([12, 16, 24]),
        max_model_len=40,
        max_num_batched_tokens=draw.choice([3, 7, 16, 64]),
        max_num_seqs=draw.choice([4, 6, 16]),
    )
    asked: dict[str, tuple[list[int], int, int]] = {}
    cut: set[str] = set()
    stems = [[draw.randrange(60) for _ in range(20)] for _ in range(2)]
    for number in range(draw.randint(2, 7)):
        prompt = draw.choice(stems)[: draw.randint(1, 20)] + [draw.randrange(60) for _ in range(draw.randint(0, 6))]
        request_id, n, length = f"r{number}", draw.randint(1, 4), draw.randint(1, 13)
        asked[request_id] = prompt, n, length
        engine.add(prompt, request_id, n=n, params=SAMPLED | {"max_tokens": length})
        for _ in range(draw.randint(0, 8)):
            engine.step()
        if draw.random() < 0.4:
            victim = draw.choice(list(asked))
            if draw.random() < 0.5:
                engine.core.abort_request(victim)
                cut |= {victim, *(f"{victim}/{index}" for index in range(4))}
            else:
                index = draw.randrange(asked[victim][1])
                engine.core.scheduler.end_sequence(victim, index)
                cut.add(victim if asked[victim][1] == 1 else f"{victim}/{index}")
            engine.scheduler.check()
    answers = engine.run()
    engine.scheduler.check(idle=True)
    assert engine.scheduler.waiting.num_waiting_tokens == 0
    assert not engine.scheduler.running._forking
    for request_id, (prompt, n, length) in asked.items():
        for index in range(n):
            key = request_id if n == 1 else f"{request_id}/{index}"
            expected = sampled_answer(prompt, length, seed=11, index=index)
            answer = answers[key]
            assert answer.token_ids == expected[: len(answer.token_ids)], key
            assert answer.token_ids == expected or key in cut, key
            assert answer.finish_reason is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("ten", range(10))
def test_i2_i5_no_schedule_spoils_a_sequence_or_loses_a_block(make_engine: MakeEngine, ten: int) -> None:
    for seed in range(ten * 10, ten * 10 + 10):
        try:
            scripted(make_engine, seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
