"""Layers that attend within chunks, offline: greedy texts of transformers with all that an engine does to sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.llm import LLM
from tests.support.engine.llm_requests import core_of, greedy
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_chunked_model
from tests.support.models.offline_texts import check_forks, check_greedy_texts, check_texts_from_host_memory
from tests.support.models.oracle import Oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chunked_model(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 17},
        {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 13},
        {"block_size": 16, "num_blocks": 13, "max_num_seqs": 4},
        {"num_blocks": 13, "disable_hybrid_kv_cache_manager": True},
        {
            "num_blocks": 64,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        },
        {"kv_cache_mib": 1, "max_num_seqs": 3},
        {"num_blocks": 9, "max_num_seqs": 4, "kv_host_mib": 1},
        {"num_blocks": 64, "kv_cache_dtype": "int8"},
        {"num_blocks": 64, "attention_backend": "torch"},
        pytest.param({"num_blocks": 64, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=[
        "steps",
        "steps as chunks",
        "preemption",
        "without groups",
        "drafts",
        "memory",
        "host",
        "int8",
        "torch",
        "ranks",
    ],
)
def test_greedy_texts(folder: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    check_greedy_texts(folder, oracle, options)


def test_chunks_come_back_from_host_memory(folder: Path, oracle: Oracle) -> None:
    check_texts_from_host_memory(folder, oracle, {"num_blocks": 8, "kv_host_mib": 4}, num_shapes=1)


def test_forks(folder: Path, oracle: Oracle) -> None:
    check_forks(folder, oracle)


def test_i1_longer_sequences_fit_where_groups_keep_their_chunks(folder: Path, oracle: Oracle) -> None:
    longest = []
    for is_disabled in (False, True):
        options: dict[str, Any] = {"dtype": "float32", "num_blocks": 12, "block_size": 8, "max_num_batched_tokens": 24}
        with LLM(str(folder), disable_hybrid_kv_cache_manager=is_disabled, **options) as llm:
            core = core_of(llm)
            longest.append(core.config.max_model_len)
            prompt = prompt_of(longest[-1] - 20)
            for _ in range(2):
                [answer] = llm.generate(prompt, greedy(max_tokens=20), use_tqdm=False)
                oracle.check(prompt, answer.outputs[0].token_ids)
            core.scheduler.check(idle=True)
    # of 48 blocks of one layer, each of three groups with chunks of 13 positions needs 6
    assert longest == [(48 - 3 * 6) * 8, 12 * 8]
