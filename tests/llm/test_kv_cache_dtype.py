"""`kv_cache_dtype` in `LLM` and `AsyncLLM`: with every feature, the probabilities of `transformers` with the same rounding."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.engine.ranks import rank_processes
from pdserve.llm import LLM, CompletionOutput, LoRARequest, RequestOutput, StreamingInput, StructuredOutputsParams
from tests.llm.conftest import TINY, CheckedAsyncLLM
from tests.support.engine.forked_engine import start_rank
from tests.support.engine.llm_requests import core_of, greedy, prompts_of, sampled
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.lora_adapters import make_adapter, merged_checkpoint
from tests.support.models.oracle import Oracle
from tests.support.models.rounded_keys import rounded_keys

STORED = {"int8": "int8", "fp8": "float8_e4m3fn"}
TOLERANCE = 0.03
"""Largest error of a log-probability. A number that lies between two steps may be rounded down in one schedule and up in another,
and logits follow: by 0.008 at most in 400 tokens of this model."""
LENGTHS = [40, 100, 17, 3, 9]


def check(oracle: Oracle, stored: str, prompt: Sequence[int], output: CompletionOutput) -> None:
    """Compare the probability of each token, whatever was sampled; the answer must have `logprobs`."""
    assert output.logprobs is not None
    with rounded_keys(stored):
        expected = oracle.logits([*prompt, *output.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
    for place, (token, found) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert found[token].logprob == pytest.approx(float(expected[place, token]), abs=TOLERANCE), place


def check_all(oracle: Oracle, stored: str, answers: Sequence[RequestOutput]) -> None:
    for answer in answers:
        assert answer.prompt_token_ids
        for output in answer.outputs:
            check(oracle, stored, answer.prompt_token_ids, output)


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("kv_cache_dtype", STORED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_blocks": 52, "max_model_len": 128, "max_num_seqs": 4},
        {"num_blocks": 52, "max_model_len": 128, "max_num_seqs": 4, "kv_host_mib": 1},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["all at once", "chunks", "preempted", "host tier", "drafts"],
)
def test_i5_probabilities_are_those_of_the_rounded_cache_in_every_schedule(
    kv_cache_dtype: str, options: dict[str, Any], make_llm: Callable[..., LLM], oracle: Oracle
) -> None:
    llm = make_llm(kv_cache_dtype=kv_cache_dtype, **options)
    prompts = prompts_of(LENGTHS)
    params = [
        greedy(max_tokens=30, logprobs=0),
        greedy(max_tokens=24, logprobs=0, prompt_logprobs=0),
        sampled(n=3, seed=4, max_tokens=30, logprobs=0),
        sampled(seed=7, n=2, max_tokens=60, logprobs=0, temperature=0.8, top_p=0.9),
        sampled(seed=1, max_tokens=30, logprobs=0, allowed_token_ids=[5, 6]),  # text that repeats, for drafts
    ]
    for _ in range(2):  # the second time from the prefix cache, or from the tier
        check_all(oracle, STORED[kv_cache_dtype], llm.generate(prompts, params, use_tqdm=False))
    stats = llm.llm_engine.client.utility("get_stats")
    assert (core_of(llm).scheduler.num_preemptions > 0) == ("num_blocks" in options)
    assert (stats["num_host_blocks_loaded"] > 0) == ("kv_host_mib" in options)
    if "speculative_config" in options:
        assert stats["spec_decoding_stats"]["num_draft_tokens"] > 0


async def test_turns_of_a_session(
    running: Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]], oracle: Oracle
) -> None:
    prompts = prompts_of([21, 4, 30])

    async def turns() -> AsyncIterator[StreamingInput]:
        for prompt in prompts:
            yield StreamingInput(prompt, greedy(max_tokens=9, logprobs=0))

    said: list[int] = []
    ended: list[RequestOutput] = []
    async with running(kv_cache_dtype="int8") as llm:
        async for answer in llm.generate(turns()):
            if answer.outputs and answer.outputs[0].finish_reason is not None and len(ended) < len(prompts):
                ended.append(answer)
        await llm.idle()
    for prompt, answer in zip(prompts, ended, strict=True):
        said += prompt
        check(oracle, "int8", said, answer.outputs[0])
        said += answer.outputs[0].token_ids


@pytest.mark.slow
def test_forms_and_adapters(tmp_path: Path, folder: Path, oracle: Oracle, make_llm: Callable[..., LLM]) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1)
    merged = Oracle(merged_checkpoint(tmp_path / "merged", folder, adapter))
    llm = make_llm(kv_cache_dtype="int8", enable_lora=True, max_lora_rank=8)
    prompt = prompt_of(33)
    form = greedy(logprobs=0, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}"))
    params = [form, greedy(logprobs=0)]
    request = LoRARequest("mine", 1, str(adapter))
    plain = llm.generate([prompt] * 2, params, use_tqdm=False)
    tuned = llm.generate([prompt] * 2, params, lora_request=request, use_tqdm=False)
    check_all(oracle, "int8", plain)
    check_all(merged, "int8", tuned)
    for answers in (plain, tuned):
        assert set(answers[0].outputs[0].text) <= {"a", "b"}
    assert plain[1].outputs[0].token_ids != tuned[1].outputs[0].token_ids


def test_ranks_share_a_quantised_cache(folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "start_program", start_rank)
    with LLM(folder, tensor_parallel_size=2, kv_cache_dtype="int8", **TINY) as llm:
        params = [greedy(logprobs=0), sampled(n=2, seed=3, logprobs=0)]
        check_all(oracle, "int8", llm.generate(prompts_of([33, 70]), params, use_tqdm=False))
        core_of(llm).scheduler.check(idle=True)


@pytest.mark.slow
def test_a_quantised_pool_holds_more_tokens(make_llm: Callable[..., LLM]) -> None:
    options = {"num_blocks": None, "kv_cache_mib": 1}
    sizes = [
        make_llm(kv_cache_dtype=each, **options).llm_engine.client.info.num_blocks for each in ("auto", "int8", "fp8")
    ]
    # 4 bytes per number of 32 bits; 1 byte per number, and 4 per head for the scale
    assert sizes[1] == sizes[2] > 2.5 * sizes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        (
            {"kv_cache_dtype": "int8", "attention_backend": "triton"},
            "'int8' and attention_backend is 'triton': only torch's",
        ),
        ({"kv_cache_dtype": "fp8", "attention_backend": "sdpa"}, "'fp8' and attention_backend is 'sdpa': only torch's"),
        ({"kv_cache_dtype": "int8", "kernels": "triton"}, "'int8' and kernels is 'triton': only torch's operations"),
    ],
)
def test_what_cannot_read_it_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)
