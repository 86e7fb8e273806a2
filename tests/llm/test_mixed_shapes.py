"""Layers whose blocks have different shapes, offline: greedy texts of transformers with all that an engine does to sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.engine.runner.pool.pool_size import host_slots, pool_size, with_kv_cache_groups
from pdserve.engine.sequence_blocks import num_window_blocks
from pdserve.llm import LLM
from pdserve.models.model_impl import read_model_config
from tests.support.models.family_checkpoints import make_gemma4_model, make_mixed_model
from tests.support.models.offline_texts import check_forks, check_greedy_texts, check_texts_from_host_memory
from tests.support.models.oracle import Oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed_model(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma4_model(tmp_path_factory.mktemp("gemma4"))


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
    check_greedy_texts(folder, oracle, options)


def test_forks(folder: Path, oracle: Oracle) -> None:
    """A partial block of each shape is copied."""
    check_forks(folder, oracle)


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
        {"num_blocks": 64, "attention_backend": "torch"},
        pytest.param({"num_blocks": 64, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["chunks", "preemption", "without windows", "drafts", "memory", "int8", "torch", "ranks"],
)
def test_greedy_texts_of_layers_that_share_keys(gemma4: Path, options: dict[str, Any]) -> None:
    """Heads of two sizes; some layers have no keys, and all read ids of tokens."""
    check_greedy_texts(gemma4, Oracle(gemma4), options)


def test_forks_of_layers_that_share_keys(gemma4: Path) -> None:
    check_forks(gemma4, Oracle(gemma4))


def test_a_pool_has_only_layers_with_keys_of_their_own(gemma4: Path) -> None:
    """Of six layers one without a window has a head of 40 numbers, and two with one have two of 16."""
    settings = DecodeSettings(model=str(gemma4), num_blocks=100, dtype="float32")
    assert memory_needs(gemma4, settings).pool == 100 * 16 * 2 * 4 * (40 + 2 * 2 * 16)


def test_prompts_that_are_embeddings_are_refused_by_name(gemma4: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prompt_embeds is true, and layers of Gemma4ForCausalLM read ids"):
        LLM(str(gemma4), num_blocks=16, enable_prompt_embeds=True)


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


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 8, "kv_host_mib": 4},
        pytest.param({"num_blocks": 8, "kv_host_mib": 4, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["one process", "ranks"],
)
def test_blocks_of_both_shapes_come_back_from_host_memory(
    folder: Path, oracle: Oracle, options: dict[str, Any]
) -> None:
    check_texts_from_host_memory(folder, oracle, options, num_shapes=2)


def test_blocks_of_layers_that_share_keys_come_back_from_host_memory(gemma4: Path) -> None:
    check_texts_from_host_memory(gemma4, Oracle(gemma4), {"num_blocks": 8, "kv_host_mib": 4}, num_shapes=2)


@pytest.mark.parametrize("size", [{"kv_cache_mib": 4}, {"num_blocks": 40}], ids=["memory", "blocks"])
def test_the_host_memory_tier_is_divided_as_the_pool_is(folder: Path, size: dict[str, Any]) -> None:
    settings = DecodeSettings(
        model=str(folder), dtype="float32", max_num_seqs=2, max_num_batched_tokens=32, kv_host_mib=16, **size
    )
    config = with_kv_cache_groups(read_model_config(folder, "float32", "auto"), settings)
    layout = config.kv_layout(16, "")
    num_blocks, _ = pool_size(settings, config.kv_cache_groups(16, ""), config)
    slots = host_slots(settings, layout, num_blocks)
    # what is left is less than a block of each shape
    assert (16 << 20) - layout.pool_bytes([1, 1]) < layout.pool_bytes(slots) <= 16 << 20
    times = (16 << 20) / layout.pool_bytes(num_blocks)
    for count, of_pool in zip(slots, num_blocks, strict=True):
        assert count == pytest.approx(times * of_pool, abs=3)
    assert memory_needs(folder, settings).host_tier == layout.pool_bytes(slots)


def test_a_tier_without_room_for_a_block_of_each_shape_is_refused_by_name(folder: Path) -> None:
    """A token takes 384 bytes in one shape and 768 in the other, so a block of 1,024 tokens of either fits by itself."""
    options: dict[str, Any] = {"dtype": "float32", "block_size": 1024, "num_blocks": 4}
    with pytest.raises(ConfigError, match=f"kv_host_mib is 1, and one block of each shape takes {1024 * 1152} bytes"):
        LLM(str(folder), kv_host_mib=1, **options)
    with pytest.raises(ConfigError, match="kv_host_mib is 1, and one block of each shape"):
        memory_needs(folder, DecodeSettings(kv_host_mib=1, **options))
    assert memory_needs(folder, DecodeSettings(kv_host_mib=2, **options)).host_tier == 1024 * 1152
