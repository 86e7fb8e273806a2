"""Prompts as embeddings: the embeddings of tokens give the text of the tokens, token for token in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import InvalidRequest
from pdserve.llm import LLM, AsyncLLM, EmbedsPrompt, PoolingParams, SamplingParams, StructuredOutputsParams
from pdserve.text.beam_search import BeamSearchParams
from tests.llm.conftest import TINY
from tests.support.engine.llm_requests import core_of, greedy, prompts_of
from tests.support.models.oracle import Oracle

NOT_FINITE = torch.zeros(3, 64)
NOT_FINITE[1, 5] = torch.nan


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **TINY, enable_prompt_embeds=True) as made:
        yield made
        core_of(made).scheduler.check(idle=True)


def embeds_of(oracle: Oracle, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        embedded: torch.Tensor = oracle._model.get_input_embeddings()(torch.tensor(prompt))
    return embedded


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "params",
    [
        greedy(max_tokens=20),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, top_p=0.9),
        SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=3, logprobs=2),
        SamplingParams(temperature=0.8, seed=5, max_tokens=12, frequency_penalty=1.0, presence_penalty=0.5),
        pytest.param(
            SamplingParams(
                temperature=1.0, seed=8, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[a-z]{4}")
            ),
            marks=pytest.mark.slow,  # a process for grammars
        ),
    ],
    ids=["greedy", "sampled", "n and logprobs", "penalties", "grammar"],
)
def test_the_text_of_the_tokens(llm: LLM, oracle: Oracle, params: SamplingParams) -> None:
    """Prompts of one chunk and of several, beside each other."""
    # without tokens before it, a text begins with a whole character
    prompts = [[*prompt, llm.get_tokenizer().encode("a")[-1]] for prompt in prompts_of([0, 5, 70, 130])]
    expected = llm.generate(prompts, params, use_tqdm=False)
    given: list[Any] = [EmbedsPrompt(prompt_embeds=embeds_of(oracle, prompt)) for prompt in prompts]
    found = llm.generate([*given, prompts[2]], params, use_tqdm=False)
    for answer, other in zip(found, [*expected, expected[2]], strict=True):
        for mine, theirs in zip(answer.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
            assert mine.finish_reason == theirs.finish_reason
            if params.logprobs is not None:
                assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
    assert (found[0].prompt, found[0].prompt_token_ids) == (None, [])


def test_other_dtypes(llm: LLM, oracle: Oracle) -> None:
    [prompt] = prompts_of([30])
    for dtype in (torch.bfloat16, torch.float16):
        rounded = embeds_of(oracle, prompt).to(dtype)
        [answer] = llm.generate(EmbedsPrompt(prompt_embeds=rounded), greedy(max_tokens=8), use_tqdm=False)
        with torch.inference_mode():
            ids = oracle._model.generate(
                inputs_embeds=rounded.float().unsqueeze(0), attention_mask=torch.ones(1, len(rounded), dtype=torch.long),
                max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert answer.outputs[0].token_ids == ids[0].tolist()


def test_cached_blocks_are_those_of_the_same_numbers(llm: LLM, oracle: Oracle) -> None:
    _, prompt = prompts_of([41, 41])
    embeds = embeds_of(oracle, prompt)
    [of_tokens] = llm.generate(prompt, greedy(), use_tqdm=False)
    other = embeds.clone()
    other[0, 0] += 0.5
    cached = []
    for tensor, salt in ((embeds, None), (embeds, None), (other, None), (embeds, "mine"), (embeds.bfloat16(), None)):
        given: Any = {"prompt_embeds": tensor} | ({} if salt is None else {"cache_salt": salt})
        [answer] = llm.generate(given, greedy(), use_tqdm=False)
        cached.append(answer.num_cached_tokens)
        if tensor is embeds:
            assert answer.outputs[0].token_ids == of_tokens.outputs[0].token_ids
    assert cached == [0, 40, 0, 0, 0]


def test_a_pool_too_small_for_all(folder: Path, oracle: Oracle) -> None:
    """Preempted sequences compute their embeddings again, and the output after them by its tokens."""
    small = TINY | {"num_blocks": 24, "max_model_len": 80}
    with LLM(folder, **small, enable_prompt_embeds=True) as llm:
        prompts = prompts_of([9, 10, 11, 12])
        given: list[Any] = [EmbedsPrompt(prompt_embeds=embeds_of(oracle, prompt)) for prompt in prompts]
        answers = llm.generate(given, greedy(max_tokens=40), use_tqdm=False)
        assert core_of(llm).scheduler.num_preemptions, "nothing was preempted"
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check(prompt, answer.outputs[0].token_ids)
        core_of(llm).scheduler.check(idle=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3, 63), "prompt_embeds has rows of 63 numbers, the model's hidden size is 64"),
        (torch.zeros(300, 64), "prompt_embeds has 300 tokens; the model's length is 256"),
        (torch.zeros(0, 64), r"must be \[tokens, hidden size\] of float32, float16 or bfloat16, not \[0, 64\]"),
        (torch.zeros(64), r"not \[64\] of torch.float32"),
        (torch.zeros(3, 64, dtype=torch.int64), r"not \[3, 64\] of torch.int64"),
        ([[0.5] * 64], "prompt_embeds must be a torch.Tensor, not list"),
        (NOT_FINITE, r"prompt_embeds\[1\]\[5\] is not finite"),
        (NOT_FINITE.half(), r"prompt_embeds\[1\]\[5\] is not finite"),
        (NOT_FINITE.bfloat16(), r"prompt_embeds\[1\]\[5\] is not finite"),
    ],
)
def test_tensors_that_are_refused(llm: LLM, given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate({"prompt_embeds": given}, greedy(), use_tqdm=False)


def test_what_needs_token_ids_is_refused(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    given = EmbedsPrompt(prompt_embeds=torch.zeros(3, 64))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: llm.generate(given, SamplingParams(prompt_logprobs=1)), "prompt_logprobs is 1, and the tokens of"),
        (lambda: llm.embed(given, use_tqdm=False), "prompt_embeds is given, and pooling takes token ids"),
        (lambda: llm.beam_search(given, BeamSearchParams(beam_width=2, max_tokens=2)), "beams begin with token ids"),
        (
            lambda: llm.generate(given, greedy(), tokenization_kwargs={"truncate_prompt_tokens": 2}),
            "prompt_embeds are not truncated",
        ),
        (lambda: llm.generate({**given, "prompt": "x"}), "must have one of 'prompt', 'prompt_token_ids' and"),  # type: ignore[arg-type]
        (lambda: make_llm().generate(given, greedy()), "prompt_embeds is given, and enable_prompt_embeds is False"),
    ]
    for call, message in calls:
        with pytest.raises(InvalidRequest, match=message):
            call()
    with pytest.raises(InvalidRequest, match="pooling takes token ids"):
        llm.llm_engine.add_request("one", given, PoolingParams())


async def test_a_stream(folder: Path, oracle: Oracle) -> None:
    [prompt] = prompts_of([20])
    llm = AsyncLLM(folder, **TINY, enable_prompt_embeds=True)
    try:
        async for answer in llm.generate(EmbedsPrompt(prompt_embeds=embeds_of(oracle, prompt)), greedy(max_tokens=12)):
            token_ids = answer.outputs[0].token_ids
        oracle.check(prompt, token_ids)
    finally:
        llm.shutdown()
