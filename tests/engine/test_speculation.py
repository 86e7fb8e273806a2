"""Drafted text is the undrafted one, whatever the drafter says, with every feature of a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.speculation.confirmed_runs import NO_DRAFT, confirmed_lengths
from pdserve.engine.speculation.drafter import DraftRows
from pdserve.engine.speculation.ngram_drafter import NgramDrafter
from pdserve.models.model_folder import DEMO, model_folder
from tests.support.engine.drafters import drafter_of, greedy_drafter, speculation, use_drafter
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer, prompt_of
from tests.support.kernels.sampling_reference import gumbel
from tests.support.models.oracle import NEAR_TIE, Oracle

PROMPTS = [prompt_of(length) for length in (3, 4, 9, 17, 22)]
SEEDED = {"temperature": 1.0, "seed": 11}
EOS = (5, 40)
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED,
    "kept sets": SEEDED | {"top_p": 0.7, "top_k": 9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.8},
    "seeded penalties": SEEDED | {"repetition_penalty": 0.8, "frequency_penalty": -0.5},
    "logit_bias": {"logit_bias": {7: 3.0, 8: -2.0, 40: 2.5}},
    "min_tokens": {"min_tokens": 11, "logit_bias": {5: 4.0, 40: 4.0}},
    "bad words": SEEDED | {"bad_words_token_ids": ((7,), (8, 9), (1, 2, 3)), "logit_bias": {8: 4.0, 9: 4.0}},
    "bad texts": SEEDED | {"bad_words": ("abc", "ca"), "logit_bias": {0: 3.0, 6: 3.0, 1: 3.0, 4: 3.0}},
    "allowed": SEEDED | {"allowed_token_ids": (1, 2, 3, 5, 8)},
    "stop tokens": {"stop_token_ids": (12, 13, 14, 15, 16, 17)},
    "logprobs": SEEDED | {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "no eos": {"ignore_eos": True, "logit_bias": {5: 4.0}},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


def answers_of(engine: Harness, params: dict[str, Any], n: int = 1) -> list[Answer]:
    """In the order of prompts and sequences. The last prompts come while the first are decoded."""
    given = {"max_tokens": 24} | params | ({"n": n} if n > 1 else {})
    names = []
    for number, prompt in enumerate(PROMPTS):
        names.append(engine.add(prompt, eos=EOS, params=given, n=n))
        if number > 2:
            engine.step()
    answers = engine.run()
    return [answers[engine.key(name, index)] for name in names for index in range(n)]


def contents(answer: Answer) -> tuple[Any, ...]:
    """All that a client sees of an answer."""
    ends = (answer.finish_reason, answer.stop_reason, answer.error_code, answer.error_message)
    return answer.token_ids, *ends, answer.logprobs, answer.prompt_logprobs


def texts_of(answers: Sequence[Answer], n: int = 1) -> list[list[int]]:
    return [PROMPTS[place // n] + answer.token_ids for place, answer in enumerate(answers)]


@pytest.mark.few(2)
@pytest.mark.parametrize("feature", FEATURES)
def test_i5_a_drafted_text_is_the_undrafted_one(make_engine: MakeEngine, feature: str) -> None:
    params = FEATURES[feature]
    expected = answers_of(make_engine(), params)
    texts, num_steps = texts_of(expected), []
    for right in (1.0, 0.7, 0.0):
        engine = make_engine(speculative_config=speculation(4))
        drafter = use_drafter(engine, drafter_of(texts, right))
        found = answers_of(engine, params)
        assert list(map(contents, found)) == list(map(contents, expected))
        assert drafter.num_drafts > 0
        num_steps.append(len(engine.model.batches))
    assert num_steps[0] <= num_steps[1] <= num_steps[2]
    if sum(len(answer.token_ids) for answer in expected) > 60:
        assert num_steps[0] < 0.6 * num_steps[2], "right drafts save steps"


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_sequences_of_one_prompt_have_drafts_of_their_own(make_engine: MakeEngine, right: float) -> None:
    params = SEEDED | {"logprobs": 1}
    expected = answers_of(make_engine(), params, n=3)
    engine = make_engine(speculative_config=speculation(3))
    use_drafter(engine, drafter_of(texts_of(expected, 3), right))
    assert list(map(contents, answers_of(engine, params, n=3))) == list(map(contents, expected))


def test_right_drafts_save_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_config=speculation(4))
    use_drafter(engine, greedy_drafter())
    assert engine.ask([1, 2, 3], params={"max_tokens": 31}).token_ids == greedy_answer([1, 2, 3], 31)
    # the prompt's step gives one token, each later one five
    assert len(engine.model.batches) == 1 + 30 // 5
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 24, 24)
    assert stats.num_accepted_tokens_per_pos == [6, 6, 6, 6]


def test_several_tokens_of_a_step_are_one_output_with_all_log_probabilities(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_config=speculation(4))
    use_drafter(engine, greedy_drafter())
    answer = engine.ask([1, 2, 3], params={"max_tokens": 31, "logprobs": 2})
    assert answer.num_outputs == 7
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 31
    assert [ids[0] for ids in answer.logprobs.logprob_token_ids] == answer.token_ids


def test_what_follows_a_stop_token_within_a_step_is_dropped(make_engine: MakeEngine) -> None:
    text = greedy_answer([1, 2, 3], 20)
    for place in range(1, 9):
        engine = make_engine(speculative_config=speculation(6))
        use_drafter(engine, greedy_drafter())
        answer = engine.ask([1, 2, 3], params={"max_tokens": 20, "stop_token_ids": (text[place],)})
        end = text.index(text[place]) + 1
        assert answer.token_ids == text[:end]
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, text[place])


def test_a_request_may_ask_for_fewer_drafts_or_none(make_engine: MakeEngine) -> None:
    for asked, num_steps in ((0, 31), (1, 16), (4, 7), (32, 7), (None, 7)):
        engine = make_engine(speculative_config=speculation(4))
        use_drafter(engine, greedy_drafter())
        answer = engine.ask([1, 2, 3], params={"max_tokens": 31}, speculative_tokens=asked)
        assert answer.token_ids == greedy_answer([1, 2, 3], 31)
        assert len(engine.model.batches) == num_steps


def test_a_large_batch_has_no_drafts(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_config=speculation(4, disable_by_batch_size=2))
    use_drafter(engine, greedy_drafter())
    names = [engine.add([n, 2, 3], params={"max_tokens": 10 + 10 * (n == 3)}) for n in (1, 2, 3)]
    while len(engine.running()) != 1:
        engine.step()
        if len(engine.running()) == 3:
            assert engine.scheduler.drafts.stats.num_drafts == 0  # type: ignore[union-attr]
    engine.run()
    for n, name in enumerate(names, 1):
        assert engine.answers[name].token_ids == greedy_answer([n, 2, 3], 10 + 10 * (n == 3))
    assert engine.scheduler.drafts.stats.num_drafts == 2  # type: ignore[union-attr]


def test_drafts_leave_room_for_other_work(make_engine: MakeEngine) -> None:
    """With a budget of few tokens, every decoding sequence still has its token in each step, and prompts go on."""
    engine = make_engine(speculative_config=speculation(8), max_num_batched_tokens=8)
    use_drafter(engine, greedy_drafter(right=0.5))
    first = [engine.add([n, 2, 3], params={"max_tokens": 40}) for n in range(3)]
    while len(engine.answers) < 3:
        engine.step()
    engine.add(prompt_of(40), "long", params={"max_tokens": 2})
    while "long" not in engine.answers:
        before = {name: len(engine.answers[name].token_ids) for name in first}
        computed = engine.scheduler.requests["long"].num_computed_tokens
        engine.step()
        assert all(len(engine.answers[name].token_ids) > before[name] for name in first if before[name] < 40)
        if "long" in engine.scheduler.requests:
            assert engine.scheduler.requests["long"].num_computed_tokens > computed
    engine.run()
    assert max(sum(batch) for batch in engine.model.batches) <= 8


def test_i2_drafts_preempt_nobody(make_engine: MakeEngine) -> None:
    """The pool holds all sequences exactly: with drafts as without, none loses its blocks."""
    for right in (1.0, 0.5, 0.0):
        engine = make_engine(speculative_config=speculation(8), num_blocks=12, max_model_len=16)
        use_drafter(engine, greedy_drafter(right))
        names = [engine.add([n, 2, 3], params={"max_tokens": 13}) for n in range(3)]
        engine.run()
        for n, name in enumerate(names):
            assert engine.answers[name].token_ids == greedy_answer([n, 2, 3], 13)
        assert engine.scheduler.num_preemptions == 0


def test_a_preempted_sequence_goes_on_with_drafts(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_config=speculation(4), num_blocks=14, max_model_len=40)
    use_drafter(engine, greedy_drafter(0.8))
    names = [engine.add([n] * 9, params={"max_tokens": 24}) for n in range(3)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for n, name in enumerate(names):
        assert engine.answers[name].token_ids == greedy_answer([n] * 9, 24)


def test_a_session_has_drafts_in_each_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_config=speculation(4))
    use_drafter(engine, greedy_drafter(0.9))
    name = engine.add([1, 2, 3], resumable=True, params={"max_tokens": 12})
    engine.run()
    tokens = [1, 2, 3, *greedy_answer([1, 2, 3], 12)]
    assert engine.turns[name][0].token_ids == tokens[3:]
    engine.resume(name, [7, 8], max_tokens=9)
    engine.core.finish_session(name)
    answer = engine.run()[name]
    assert answer.token_ids == greedy_answer([*tokens, 7, 8], 9)
    assert engine.scheduler.drafts.stats.num_accepted_tokens > 10  # type: ignore[union-attr]


def test_a_resumed_sequence_has_drafts(make_engine: MakeEngine) -> None:
    prompt, text = [1, 2, 3], greedy_answer([1, 2, 3], 20)
    engine = make_engine(speculative_config=speculation(4))
    use_drafter(engine, greedy_drafter(0.9))
    answer = engine.ask(prompt, output=text[:7], params={"max_tokens": 20})
    assert answer.token_ids == text[7:]


def test_i3_only_confirmed_tokens_enter_the_prefix_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(speculative_config=speculation(6))
    use_drafter(engine, greedy_drafter(0.5))
    text = [1, 2, 3, *engine.ask([1, 2, 3], params={"max_tokens": 30}).token_ids]
    cache = engine.kv_cache.tolist()
    hashes = engine.hasher.extend(engine.root, text)
    known = [engine.scheduler.pool.find(block_hash) for block_hash in hashes]
    # the last token has no KV
    assert [block is not None for block in known] == [True] * (32 // 4)
    for number, block in enumerate(known):
        positions = range(4 * number, 4 * number + 4)
        assert block is not None
        assert cache[block.block_id] == [position * 1024 + text[position] for position in positions]
    assert engine.scheduler.pool.num_cached == len(hashes)


def test_a_step_ahead_waits_for_drafts_and_not_where_there_are_none(make_engine: MakeEngine) -> None:
    for asked, is_ahead in ((None, False), (0, True)):
        engine = make_engine(speculative_config=speculation(4), async_scheduling=True)
        use_drafter(engine, greedy_drafter(0.8))
        engine.add([1, 2, 3], "r", params={"max_tokens": 30}, speculative_tokens=asked)
        was_ahead = False
        while engine.core.has_work:
            engine.step()
            was_ahead |= engine.core._ahead is not None
        assert engine.answers["r"].token_ids == greedy_answer([1, 2, 3], 30)
        assert was_ahead is is_ahead


# ---- a real model


def record_prompt(seed: int, vocab_size: int) -> list[int]:
    """Random tokens in which parts come again."""
    draw = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 20:
        if tokens and draw.random() < 0.5:
            start = draw.randrange(len(tokens))
            tokens += tokens[start : start + draw.randint(2, 8)]
        else:
            tokens += [draw.randrange(3, vocab_size) for _ in range(draw.randint(1, 5))]
    return tokens


def real_answers(engine: Harness, prompts: Sequence[list[int]], params: dict[str, Any]) -> list[list[int]]:
    names = [engine.add(prompt, params={"max_tokens": 40, "seed": 1} | params) for prompt in prompts]
    engine.run(max_steps=50_000)
    return [engine.answers[name].token_ids for name in names]


def check_real(
    folder: Path,
    make_real_engine: Callable[..., Harness],
    params: dict[str, Any],
    num_prompts: int,
    max_differing: int,
    max_num_seqs: int = 16,
) -> None:
    """In float32 texts differ only where the two highest sums of scaled logit and noise are less than 1e-4 apart."""
    room = {"max_num_seqs": max_num_seqs, "num_blocks": 8 * max_num_seqs}
    undrafted = make_real_engine(folder, **room)
    vocab_size = undrafted.core.vocab_size
    prompts = [record_prompt(seed, vocab_size) for seed in range(num_prompts)]
    expected = real_answers(undrafted, prompts, params)
    setting = speculation(4, prompt_lookup_min=1, prompt_lookup_max=3)
    engine = make_real_engine(folder, **room, speculative_config=setting)
    if params["temperature"]:
        # n-grams are hardly ever right in the random text of random weights
        texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
        use_drafter(engine, drafter_of(texts, 0.8, vocab_size))
    found = real_answers(engine, prompts, params)
    stats = engine.scheduler.drafts.stats
    assert stats is not None
    assert stats.num_accepted_tokens > 2 * num_prompts, "too few drafts to show anything"
    assert stats.num_draft_tokens > 1.1 * stats.num_accepted_tokens, "no draft was wrong"
    differing = [place for place in range(num_prompts) if found[place] != expected[place]]
    for place in differing:
        margin = margin_at_difference(Oracle(folder), prompts[place], expected[place], found[place], params)
        print(f"sequence {place} differs by a margin of {margin:.1e}")
        assert margin < NEAR_TIE
    print(f"{len(differing)} of {num_prompts} sequences differ; {stats.num_accepted_tokens} drafts stood")
    assert len(differing) <= max_differing


def margin_at_difference(
    oracle: Oracle, prompt: list[int], expected: list[int], found: list[int], params: dict[str, Any]
) -> float:
    """The number by which the sum of one of the two tokens exceeds the other's; without penalties and kept sets."""
    place = next(place for place, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other)
    logits = oracle.logits(prompt + expected[:place])[-1]
    tokens, temperature = (expected[place], found[place]), params["temperature"]
    if not temperature:
        return abs(float(logits[tokens[0]] - logits[tokens[1]]))
    sums = [float(logits[token]) / temperature + gumbel(1, 0, place, token) for token in tokens]
    return abs(sums[0] - sums[1])


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_i1_a_real_model_says_the_same_with_drafts(
    temperature: float, tiny_checkpoints: Callable[..., Path], make_real_engine: Callable[..., Harness]
) -> None:
    check_real(tiny_checkpoints("qwen3"), make_real_engine, {"temperature": temperature}, 32, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_i1_a_thousandth_of_many_sequences_of_the_bundled_model_may_differ(
    temperature: float, make_real_engine: Callable[..., Harness]
) -> None:
    params = {"temperature": temperature, "max_tokens": 24}
    check_real(model_folder(DEMO), make_real_engine, params, 1000, 1, max_num_seqs=64)


# ---- n-grams


def _no_parameters(rows: Any, num_drafts: int) -> Any:
    raise AssertionError("n-grams are found, not sampled")


def test_n_grams_are_looked_up_from_the_longest_and_from_the_first_place() -> None:
    def drafted(tokens: list[int], limit: int = 3, shortest: int = 1, longest: int = 3) -> list[int]:
        rows = DraftRows(
            np.array([0]), np.array([limit]), np.array([tokens + [9] * 4]), np.array([len(tokens)]), _no_parameters
        )
        return list(NgramDrafter(shortest, longest).propose(rows)[0])

    assert drafted([1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert drafted([7, 3, 8, 1, 2, 3, 4, 1, 2, 3]) == [4, 1, 2], "three tokens match, and not one alone"
    assert drafted([7, 3, 8, 1, 2, 3, 4, 1, 2, 3], longest=1) == [8, 1, 2]
    assert drafted([5, 3, 6, 3]) == [6, 3]
    assert drafted([5, 3, 6, 3], shortest=2) == []
    assert drafted([2, 3, 4, 2, 3, 5, 2, 3], limit=2) == [4, 2], "of equal ones the first"
    assert drafted([1]) == drafted([1, 2, 3]) == []
    assert drafted([4, 4, 4, 4], limit=5) == [4]


def naive(tokens: list[int], limit: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size :][:limit]
    return []


def test_n_grams_are_those_of_a_plain_search() -> None:
    draw = random.Random(1)
    for _ in range(500):
        tokens = [draw.randrange(3) for _ in range(draw.randint(1, 30))]
        shortest = draw.randint(1, 4)
        longest, limit = draw.randint(shortest, 6), draw.randint(1, 6)
        rows = DraftRows(
            np.array([1]),
            np.array([limit]),
            np.array([[0] * len(tokens), tokens]),
            np.array([0, len(tokens)]),
            _no_parameters,
        )
        assert list(NgramDrafter(shortest, longest).propose(rows)[0]) == naive(tokens, limit, shortest, longest)


def test_runs_end_behind_the_first_difference_and_before_what_cannot_be_sampled() -> None:
    drafts = np.array([1, 2, NO_DRAFT, NO_DRAFT, 5, 6, NO_DRAFT])
    every = np.ones(7, np.bool_)
    lengths = np.array([3, 1, 3])
    for token_ids, usable, expected in (
        ([1, 2, 3, 4, 5, 6, 7], every, [3, 1, 3]),
        ([1, 9, 3, 4, 9, 6, 7], every, [2, 1, 1]),
        ([9, 2, 3, 4, 5, 9, 7], every, [1, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 7], np.array([True, False, True, False, False, True, False]), [1, 1, 1]),
        ([1, 2, 3, 4, 5, 6, 7], np.array([True, True, False, True, True, True, False]), [2, 1, 2]),
    ):
        assert confirmed_lengths(np.array(token_ids), drafts, usable, lengths).tolist() == expected
