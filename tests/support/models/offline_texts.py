"""Answers of `LLM` with a checkpoint of any family, against `transformers`: prompts that share beginnings, twice, and forks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.llm import LLM, SamplingParams
from tests.support.engine.copied_blocks import CopiedBlocks
from tests.support.engine.llm_requests import core_of
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle

_NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
SHARED = prompt_of(50, 7)
PROMPTS = [[*SHARED, *prompt_of(5, 1)], [*SHARED, *prompt_of(40, 2)], prompt_of(9, 3), SHARED[:48]]


def check_greedy_texts(folder: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    """Twice, so that prompts are found in the cache. With a quantised cache only the lengths are compared."""
    with LLM(str(folder), dtype="float32", max_model_len=112, **options) as llm:
        for _ in range(2):
            for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
                if "kv_cache_dtype" not in options:
                    oracle.check(prompt, list(answer.outputs[0].token_ids))
                assert len(answer.outputs[0].token_ids) == _NUM_TOKENS


def check_forks(folder: Path, oracle: Oracle) -> None:
    """Sampled texts of one prompt, and their log-probabilities. A partial block is copied."""
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=8, logprobs=2, ignore_eos=True)
    with LLM(str(folder), dtype="float32", num_blocks=64) as llm:
        [answer] = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    texts = [list(output.token_ids) for output in answer.outputs]
    assert len({tuple(text) for text in texts}) > 1
    for output, text in zip(answer.outputs, texts, strict=True):
        logits = oracle.logits([*PROMPTS[0], *text])[len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
        assert output.logprobs is not None
        for place, (token, found) in enumerate(zip(text, output.logprobs, strict=True)):
            assert abs(found[token].logprob - float(logits[place, token])) < 1e-3


def check_texts_from_host_memory(folder: Path, oracle: Oracle, options: dict[str, Any], num_shapes: int) -> None:
    """Ask in turns for prompts that a pool keeps one or two of: blocks of every shape go to host memory and come back. options:
    with the pool's size, and `kv_host_mib`."""
    prompts = [prompt_of(65 + 3 * seed, seed) for seed in range(5)]
    with LLM(str(folder), dtype="float32", max_model_len=112, max_num_batched_tokens=32, **options) as llm:
        core = core_of(llm)
        assert core.scheduler.pool.num_shapes == num_shapes
        copied = CopiedBlocks(core)
        for prompt in prompts * 3:
            [answer] = llm.generate([prompt], GREEDY, use_tqdm=False)
            oracle.check(prompt, list(answer.outputs[0].token_ids))
        core.scheduler.check(idle=True)
    assert min(copied.stored) > 0, f"stored by shape: {copied.stored}"
    assert min(copied.loaded) > 0, f"loaded by shape: {copied.loaded}"
