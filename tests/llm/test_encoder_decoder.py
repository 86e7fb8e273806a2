"""`LLM` with models that have an encoder: the greedy answers of transformers, whatever the batch and the pool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import ConfigError, InvalidRequest, PromptTooLong, UnsupportedModel
from pdserve.llm import LLM, StructuredOutputsParams, TokensPrompt
from pdserve.text.beam_search import BeamSearchParams
from tests.support.engine.llm_requests import core_of, greedy, sampled
from tests.support.models.encoder_decoder_checkpoints import FAMILIES, START, GreedyAnswers, make_encoder_decoder

MAX_TOKENS = 24


def prompts_of(lengths: list[int]) -> list[TokensPrompt]:
    draw = random.Random(5)
    return [TokensPrompt(prompt_token_ids=[draw.randrange(3, 300) for _ in range(n)]) for n in lengths]


def ask(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, GreedyAnswers]]:
    made = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, GreedyAnswers(make_encoder_decoder(folder, name))
    return made


@pytest.fixture(scope="module")
def bart(folders: dict[str, tuple[Path, GreedyAnswers]]) -> Iterator[LLM]:
    llm = LLM(str(folders["bart"][0]), num_blocks=64)
    yield llm
    core_of(llm).scheduler.check(idle=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("bart", "t5") else pytest.mark.slow) for name in FAMILIES]
)
def test_i1_greedy_answers_are_those_of_transformers(name: str, folders: dict[str, tuple[Path, GreedyAnswers]]) -> None:
    folder, theirs = folders[name]
    llm = LLM(str(folder), num_blocks=64, attention_backend="torch" if name == "t5" else "auto")
    prompts = prompts_of([1, 2, 15, 16, 17, 50, 96])
    answers = ask(llm, prompts, greedy(max_tokens=MAX_TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == theirs.answer(prompt["prompt_token_ids"], MAX_TOKENS)
    assert len({tuple(answer) for answer in answers}) > 2
    assert len({token for answer in answers for token in answer}) > 4, "the answers are degenerate and test nothing"
    core_of(llm).scheduler.check(idle=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_tiny_pool_preempts_and_changes_no_answer(name: str, folders: dict[str, tuple[Path, GreedyAnswers]]) -> None:
    folder, theirs = folders[name]
    # two sequences of 2 + 3 blocks do not fit together
    llm = LLM(str(folder), num_blocks=9, max_model_len=64, enable_prefix_caching=False)
    prompts = prompts_of([20, 1, 30, 18])
    params = [greedy(max_tokens=40, ignore_eos=True), sampled(seed=3, max_tokens=40, ignore_eos=True)] * 2
    answers = ask(llm, prompts, params)
    assert core_of(llm).scheduler.num_preemptions > 0
    for place in (0, 2):
        assert answers[place] == theirs.answer(prompts[place]["prompt_token_ids"], 40)
    core_of(llm).scheduler.check(idle=True)
    large = LLM(str(folder), num_blocks=64)
    assert ask(large, prompts, params) == answers


def test_several_sequences_and_logprobs(bart: LLM, folders: dict[str, tuple[Path, GreedyAnswers]]) -> None:
    [prompt] = prompts_of([19])
    [answer] = bart.generate(prompt, sampled(seed=4, n=3, logprobs=2, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert answer.prompt_token_ids == prompt["prompt_token_ids"]
    assert len({tuple(sequence.token_ids) for sequence in answer.outputs}) == 3
    for sequence in answer.outputs:
        tokens = list(sequence.token_ids)
        logits = folders["bart"][1].logits(prompt["prompt_token_ids"], [START, *tokens])
        assert sequence.logprobs is not None
        for token, entries, row in zip(tokens, sequence.logprobs, logits.log_softmax(-1), strict=False):
            assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert set(row.topk(2).indices.tolist()) <= set(entries)


def test_a_prompt_is_found_in_the_prefix_cache_whole_or_not_at_all(
    bart: LLM, folders: dict[str, tuple[Path, GreedyAnswers]]
) -> None:
    [long] = prompts_of([47])
    start = TokensPrompt(prompt_token_ids=long["prompt_token_ids"][:32])
    padded = TokensPrompt(prompt_token_ids=[*long["prompt_token_ids"], 0])
    params = greedy(max_tokens=30, ignore_eos=True)
    first, again = (bart.generate(long, params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 47)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    for other in (start, padded):
        # the first blocks have the same tokens, and another encoder output
        [answer] = bart.generate(other, params, use_tqdm=False)
        assert answer.num_cached_tokens == 0
        assert list(answer.outputs[0].token_ids) == folders["bart"][1].answer(other["prompt_token_ids"], 30)


def test_penalties_see_the_output_alone(bart: LLM, folders: dict[str, tuple[Path, GreedyAnswers]]) -> None:
    [prompt] = prompts_of([12])
    params = greedy(max_tokens=8, repetition_penalty=1.7, ignore_eos=True)
    [answer] = ask(bart, prompt, params)
    logits = folders["bart"][1].logits(prompt["prompt_token_ids"], [START, *answer])
    for place, token in enumerate(answer):
        row, seen = logits[place].clone(), torch.tensor(answer[:place], dtype=torch.int64)
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.7, row[seen] * 1.7)
        assert token == int(row.argmax())


@pytest.mark.slow
def test_structured_outputs_and_stop_strings(bart: LLM) -> None:
    [prompt] = prompts_of([21])
    form = StructuredOutputsParams(choice=("yes", "no"))
    [answer] = bart.generate(prompt, greedy(max_tokens=12, structured_outputs=form), use_tqdm=False)
    assert answer.outputs[0].text in ("yes", "no")
    [usual] = bart.generate(prompt, sampled(seed=1, max_tokens=20, ignore_eos=True), use_tqdm=False)
    stop = usual.outputs[0].text[5:8]
    [stopped] = bart.generate(prompt, sampled(seed=1, max_tokens=20, ignore_eos=True, stop=(stop,)), use_tqdm=False)
    assert stopped.outputs[0].text == usual.outputs[0].text[: usual.outputs[0].text.index(stop)]


def test_a_beam_search_goes_on_in_the_decoder(bart: LLM, folders: dict[str, tuple[Path, GreedyAnswers]]) -> None:
    [prompt] = prompts_of([14])
    [answer] = bart.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=6))
    best = answer.sequences[0]
    output = best.tokens[14:]
    logits = folders["bart"][1].logits(prompt["prompt_token_ids"], [START, *output]).log_softmax(-1)
    assert best.cum_logprob == pytest.approx(sum(float(logits[i, t]) for i, t in enumerate(output)), abs=1e-3)


def test_refused_requests(bart: LLM) -> None:
    with pytest.raises(PromptTooLong, match="97 tokens; the model's length is 96 tokens"):
        bart.generate(prompts_of([97]), greedy(), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="max_tokens is 96, the decoder of this model writes at most 95 tokens"):
        bart.generate(prompts_of([3]), greedy(max_tokens=96), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="prompt_logprobs is 1, and an encoder gives its prompt no probabilities"):
        bart.generate(prompts_of([3]), greedy(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="pooling_params is given, and a model with an encoder generates alone"):
        bart.embed(prompts_of([3]), use_tqdm=False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"enable_lora": True}, "enable_lora is true, and BartForConditionalGeneration has an encoder"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is set, and Bart.*its encoder reads token ids"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is set, and Bart",
        ),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size is 2, and Bart.* has an encoder; such a model is not split",
        ),
        ({"long_prefill_token_threshold": 8}, "long_prefill_token_threshold is set.*encoded in one step"),
        ({"max_model_len": 97}, "max_model_len is 97, the model supports at most 96"),
    ],
)
def test_refused_settings(option: dict[str, Any], message: str, folders: dict[str, tuple[Path, GreedyAnswers]]) -> None:
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        LLM(str(folders["bart"][0]), num_blocks=64, **option)
