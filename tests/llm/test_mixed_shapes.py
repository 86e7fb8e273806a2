"""Layers whose blocks have different shapes, offline: greedy texts of transformers with all that an engine does to sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.engine.runner.pool.pool_size import pool_size, with_kv_cache_groups
from pdserve.engine.sequence_blocks import num_window_blocks
from pdserve.llm import LLM, SamplingParams
from pdserve.models.model_impl import read_model_config
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_mixed_model
from tests.support.models.oracle import Oracle

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHARED = prompt_of(50, 7)
PROMPTS = [[*SHARED, *prompt_of(5, 1)], [*SHARED, *prompt_of(40, 2)], prompt_of(9, 3), SHARED[:48]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed_model(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 17},
        {"block_size": 16, "num_blocks": 13, "max_num_seqs": 4},
        {"num_blocks": 13, "disable_hybrid_kv_cache_manager": True},
        {
            "num_blocks": 64,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        },
        {"kv_cache_mib": 1, "max_num_seqs": 3},
        {"num_blocks": 64, "kv_cache_dtype": "int8"},
        pytest.param({"num_blocks": 64, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["chunks", "preemption", "without windows", "drafts", "memory", "int8", "ranks"],
)
def test_greedy_texts(folder: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    """Twice, so that prompts are found in the cache."""
    with LLM(str(folder), dtype="float32", max_model_len=112, **options) as llm:
        for _ in range(2):
            for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
                if "kv_cache_dtype" not in options:
                    oracle.check(prompt, list(answer.outputs[0].token_ids))
                assert len(answer.outputs[0].token_ids) == 12


def test_forks(folder: Path, oracle: Oracle) -> None:
    """A partial block of each shape is copied."""
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


def test_a_pool_has_the_bytes_of_both_shapes(folder: Path) -> None:
    """Two layers with one KV head and two with two heads, of 24 numbers."""
    settings = DecodeSettings(model=str(folder), num_blocks=100, dtype="float32")
    assert memory_needs(folder, settings).pool == 100 * 16 * 2 * 24 * 4 * (2 * 1 + 2 * 2)


def test_groups_with_a_window_get_no_more_memory_than_their_windows_need(folder: Path) -> None:
    """Else a long sequence would find half of the memory: a token takes 768 bytes without a window and 1,536 with one."""
    settings = DecodeSettings(
        model=str(folder), dtype="float32", max_num_seqs=2, max_num_batched_tokens=32, kv_cache_mib=4
    )
    config = with_kv_cache_groups(read_model_config(folder, "float32", "auto"), settings)
    groups = config.kv_cache_groups(16, "")
    (full, windowed), _ = pool_size(settings, groups, config)
    assert full * 16 * 768 > 0.9 * (4 << 20)
    assert windowed == 2 * 2 * num_window_blocks(19, 16, 32)


def test_the_host_memory_tier_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_host_mib is 4, and the model's KV cache has blocks of 2 shapes"):
        LLM(str(folder), num_blocks=16, kv_host_mib=4)
