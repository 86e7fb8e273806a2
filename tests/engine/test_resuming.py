"""A sequence that goes on where an earlier attempt ended: at any position, the same rest (I4, I5)."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.scheduler.kv_messages import Settled
from tests.support.engine.engine_harness import Answer, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import greedy_answer, prompt_of, sampled_answer

SAMPLED = {"temperature": 1.0, "seed": 11}
COUNT = 12


def rest_of(answer: Answer, cut: int) -> tuple[Any, ...]:
    """The expected output after `cut` tokens: position, tokens, end, log-probabilities."""
    logprobs = None if answer.logprobs is None else answer.logprobs.part(cut)
    return cut, answer.token_ids[cut:], answer.finish_reason, answer.stop_reason, logprobs


def all_of(answer: Answer) -> tuple[Any, ...]:
    return answer.first_position, answer.token_ids, answer.finish_reason, answer.stop_reason, answer.logprobs


@pytest.mark.few(6)
@pytest.mark.diagonal
@pytest.mark.parametrize("params", [
    {"temperature": 0.0}, SAMPLED, SAMPLED | {"repetition_penalty": 1.7},
    SAMPLED | {"presence_penalty": 1.5, "frequency_penalty": 1.0}, SAMPLED | {"logprobs": 3},
    SAMPLED | {"min_tokens": 9, "stop_token_ids": tuple(range(40))}, SAMPLED | {"stop_token_ids": (3, 5, 8)},
    SAMPLED | {"bad_words": ("abca", "cc")},
    SAMPLED | {"bad_words_token_ids": ((5, 6), (6, 7), (9,))}, SAMPLED | {"top_k": 4, "top_p": 0.8},
    SAMPLED | {"min_p": 0.02, "temperature": 3.0}, SAMPLED | {"top_p": 0.7},
    SAMPLED | {"logit_bias": {3: 2.5, 7: -100.0}, "allowed_token_ids": (1, 3, 5, 7, 11, 40)},
])  # fmt: skip
@pytest.mark.parametrize("length", [3, 4, 9])
def test_i4_i5_a_sequence_resumed_at_any_position_has_the_same_rest(
    make_engine: MakeEngine, params: dict[str, Any], length: int
) -> None:
    params = {"max_tokens": COUNT} | params
    prompt = prompt_of(length)
    whole = make_engine().ask(prompt, params=params)
    assert len(whole.token_ids) > 1
    for cut in range(len(whole.token_ids)):  # every place in a block, and every block's edge
        engine = make_engine(max_num_batched_tokens=5)
        answer = engine.ask(prompt, output=whole.token_ids[:cut], params=params)
        assert all_of(answer) == rest_of(whole, cut), f"cut at {cut}"
        assert engine.model.num_tokens == length + len(whole.token_ids) - 1


@pytest.mark.few(1)
@pytest.mark.parametrize("index", [0, 2])
def test_i5_one_of_several_sequences_goes_on_alone(make_engine: MakeEngine, index: int) -> None:
    prompt = prompt_of(6)
    expected = sampled_answer(prompt, COUNT, seed=11, index=index)
    for cut in range(COUNT):
        answer = make_engine().ask(prompt, index=index, output=expected[:cut], params=SAMPLED | {"max_tokens": COUNT})
        assert answer.token_ids == expected[cut:]


@pytest.mark.few(6)
@pytest.mark.parametrize("cut", range(COUNT))
def test_i4_a_resumed_sequence_through_p_and_d(make_engine: MakeEngine, cut: int) -> None:
    prompt = prompt_of(6)
    expected = sampled_answer(prompt, COUNT, seed=11)
    p, d = make_engine(max_num_batched_tokens=5), make_engine()
    pair = Pair(p, d)
    params = SAMPLED | {"max_tokens": COUNT}
    if cut == COUNT - 1:  # one token is left: prefill gives it alone
        p.add(prompt, "r", output=expected[:cut], params=params)
        p.run()
    else:
        pair.add(prompt, "r", output=expected[:cut], params=params)
        pair.run()
        assert d.model.num_tokens == COUNT - cut - 1, "decode computed what it received"
    answer = pair.answer("r")
    assert (answer.first_position, answer.token_ids) == (cut, expected[cut:])
    assert p.model.num_tokens == 6 + cut


def test_what_was_resumed_is_found_in_the_cache_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = prompt_of(6)
    expected = greedy_answer(prompt, COUNT)
    first = engine.ask(prompt, params={"max_tokens": 9})
    assert first.token_ids == expected[:9]
    computed = engine.model.num_tokens
    again = engine.ask(prompt, output=expected[:9], params={"max_tokens": COUNT})
    assert again.token_ids == expected[9:]
    # 14 of the 15 tokens have been computed, 12 of them fill blocks
    assert again.num_cached_tokens == 12
    assert engine.model.num_tokens - computed == 3 + 2


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED])
@pytest.mark.parametrize("num_blocks", [9, 10, 12])
def test_a_resumed_sequence_that_is_preempted_repeats_nothing(
    make_engine: MakeEngine, num_blocks: int, params: dict[str, Any]
) -> None:
    engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=13)
    wanted = {}
    for number in range(5):
        prompt = [number * 5 + place for place in range(3 + 2 * number)]
        expected = sampled_answer(prompt, 20, seed=11) if params is SAMPLED else greedy_answer(prompt, 20)
        request_id = engine.add(prompt, output=expected[: 3 * number], params=params | {"max_tokens": 20})
        wanted[request_id] = expected[3 * number :]
    answers = engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert {request_id: answers[request_id].token_ids for request_id in wanted} == wanted


def test_a_source_publishes_the_resumed_output_with_the_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = prompt_of(6)
    expected = greedy_answer(prompt, 8)
    engine.add(prompt, "r", output=expected[:7], transfer_source=True, wanted_from=1, params={"max_tokens": 20})
    engine.run()
    assert (engine.answers["r"].first_position, engine.answers["r"].token_ids) == (7, expected[7:])
    indexes = set()
    for message in engine.outbox.take():
        assert isinstance(message, Settled)
        indexes |= {message.first_index + place for place in range(len(message.hold))}
        engine.scheduler.holds.back(message.hold)
    assert indexes == {1, 2, 3}, "13 tokens are four blocks, of which the first was not wanted"


def test_the_limit_counts_what_was_resumed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=20)
    prompt = prompt_of(6)
    expected = greedy_answer(prompt, 14)
    answer = engine.ask(prompt, output=expected[:10], params={"max_tokens": 50})
    assert (answer.token_ids, answer.finish_reason) == (expected[10:], FinishReason.LENGTH)
    for output, params, limit in (
        (expected, {"max_tokens": 50}, "has 14 tokens, at most 13"),
        (expected[:4], {"max_tokens": 4}, "has 4 tokens, at most 3"),
        ([1, 99], {"max_tokens": 50}, r"output_token_ids\[1\] is 99"),
    ):
        with pytest.raises(InvalidRequest, match=limit) as refused:
            engine.request(prompt, output=output, params=params)
        assert refused.value.field == "output_token_ids"
