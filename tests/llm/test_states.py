"""Layers with a state per sequence, offline: greedy texts of transformers with all that an engine does to sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.pool.pool_size import pool_size, with_kv_cache_groups
from pdserve.llm import LLM
from pdserve.models.model_impl import read_model_config
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.support.models.family_checkpoints import make_family, make_state_model
from tests.support.models.offline_texts import (
    GREEDY,
    SHARED,
    check_forks,
    check_greedy_texts,
    check_texts_from_host_memory,
)
from tests.support.models.oracle import Oracle

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_state_model(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_next",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("kimi_linear", "falcon_h1", "jamba", "mamba")),
    ],
)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """A matrix per head in three of four layers, or next to attention in each; numbers per channel in some layers, or in all."""
    folder = make_state_model(tmp_path_factory.mktemp(request.param), request.param)
    return folder, Oracle(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    """Every layer keeps a state: there is one group, and no layer has keys."""
    folder = make_state_model(tmp_path_factory.mktemp("alone"), "mamba2")
    return folder, Oracle(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 17},
        {"block_size": 16, "num_blocks": 13, "max_num_seqs": 4},
        {"num_blocks": 13, "disable_hybrid_kv_cache_manager": True},
        {"num_blocks": 64, "enable_prefix_caching": False},
        {"kv_cache_mib": 1, "max_num_seqs": 3},
        {"num_blocks": 64, "kv_cache_dtype": "int8"},
        {"num_blocks": 64, "speculative_config": NGRAM},
        pytest.param({"num_blocks": 64, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"num_blocks": 64, "tensor_parallel_size": 2, "speculative_config": NGRAM}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "chunks",
        "preemption",
        "without windows",
        "without cache",
        "memory",
        "int8",
        "drafts",
        "ranks",
        "ranks with drafts",
    ],
)
def test_greedy_texts(folder: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    check_greedy_texts(folder, oracle, options)


@pytest.mark.parametrize("options", [{"block_size": 4, "max_num_batched_tokens": 17}, {"num_blocks": 13}])
def test_greedy_texts_of_other_states(other: tuple[Path, Oracle], options: dict[str, Any]) -> None:
    folder, oracle = other
    options = {"num_blocks": 128, **options}
    check_greedy_texts(folder, oracle, options)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 17},
        {"block_size": 16, "num_blocks": 5, "max_num_seqs": 4},
        {"num_blocks": 64, "enable_prefix_caching": False},
        {"kv_cache_mib": 1, "max_num_seqs": 3},
        {"block_size": 4, "num_blocks": 8, "kv_host_mib": 4, "max_num_batched_tokens": 17},
        pytest.param({"num_blocks": 64, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["chunks", "preemption", "without cache", "memory", "host tier", "ranks"],
)
def test_greedy_texts_of_states_alone(alone: tuple[Path, Oracle], options: dict[str, Any]) -> None:
    folder, oracle = alone
    check_greedy_texts(folder, oracle, options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 8, "kv_host_mib": 4},
        {"num_blocks": 8, "kv_host_mib": 4, "speculative_config": NGRAM},
        pytest.param({"num_blocks": 8, "kv_host_mib": 4, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["alone", "drafts", "ranks"],
)
def test_states_come_back_from_host_memory(folder: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    check_texts_from_host_memory(folder, oracle, options, num_shapes=2)


def test_other_states_come_back_from_host_memory(other: tuple[Path, Oracle]) -> None:
    folder, oracle = other
    num_shapes = 1 if "mamba" in folder.name else 2
    check_texts_from_host_memory(folder, oracle, {"num_blocks": 8, "kv_host_mib": 4}, num_shapes)


def test_forks(folder: Path, oracle: Oracle) -> None:
    """A partial block of each shape is copied."""
    check_forks(folder, oracle)


def test_forks_of_other_states(other: tuple[Path, Oracle]) -> None:
    check_forks(*other)


def test_forks_of_states_alone(alone: tuple[Path, Oracle]) -> None:
    check_forks(*alone)


def test_states_alone_are_as_many_for_any_length(alone: tuple[Path, Oracle]) -> None:
    """Without positions only the setting limits a sequence; rounded keys are refused."""
    folder, oracle = alone
    prompt = prompt_of(700, 4)
    with LLM(str(folder), dtype="float32", num_blocks=4, max_num_batched_tokens=64) as llm:
        [answer] = llm.generate([prompt], GREEDY, use_tqdm=False)
    oracle.check(prompt, list(answer.outputs[0].token_ids))
    settings = DecodeSettings(model=str(folder), dtype="float32", num_blocks=4, max_model_len=1 << 20)
    config = with_kv_cache_groups(read_model_config(folder, "float32", "auto"), settings)
    assert pool_size(settings, config.kv_cache_groups(16, ""), config) == ((4,), 1 << 20)
    with pytest.raises(ConfigError, match="kv_cache_dtype int8 rounds keys and values, and Mamba2ForCausalLM has only"):
        LLM(str(folder), num_blocks=16, kv_cache_dtype="int8")


def test_a_pool_has_two_states_per_sequence_and_some_for_the_cache(folder: Path) -> None:
    """Three layers with a convolution of three columns keep two of 64 channels, in float32."""
    settings = DecodeSettings(model=str(folder), dtype="bfloat16", max_num_seqs=2, kv_cache_mib=4)
    config = with_kv_cache_groups(read_model_config(folder, "bfloat16", "auto"), settings)
    groups = config.kv_cache_groups(16, "")
    assert groups[1].shape.block_bytes == 3 * 2 * 64 * 4
    (_, states), _ = pool_size(settings, groups, config)
    assert states == 4 * 2


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
def test_chunks_that_end_at_every_offset(folder: Path, oracle: Oracle, other: tuple[Path, Oracle], chunk: int) -> None:
    """Of a block, and of the columns that a convolution keeps: borders lie at multiples of a number without a factor of 16, or of
    fewer tokens than the columns."""
    for model, expected in ((folder, oracle), other):
        check_greedy_texts(model, expected, {"num_blocks": 64, "max_num_batched_tokens": chunk, "max_num_seqs": 1})


@pytest.mark.parametrize("budget", [16, 48, 1024])
@pytest.mark.parametrize("of", ["some layers", "all layers"])
def test_a_hit_ends_where_a_state_is_kept(
    folder: Path, oracle: Oracle, alone: tuple[Path, Oracle], budget: int, of: str
) -> None:
    """At the end of a step, which is the end of a full block: of the prompt, and of each chunk."""
    if of == "all layers":
        folder, oracle = alone
    first, second = [*SHARED[:40], *prompt_of(30, 1)], [*SHARED[:40], *prompt_of(9, 2)]
    with LLM(str(folder), dtype="float32", num_blocks=64, max_num_batched_tokens=budget) as llm:
        llm.generate([first], GREEDY, use_tqdm=False)
        [again, other] = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in (first, second))
    # the last full block before the last token
    assert again.num_cached_tokens == 64
    assert other.num_cached_tokens == (32 if budget == 16 else 0)
    for prompt, answer in ((first, again), (second, other)):
        oracle.check(prompt, list(answer.outputs[0].token_ids))


def test_a_smaller_model_drafts(folder: Path, oracle: Oracle, tmp_path: Path) -> None:
    smaller = tmp_path / "llama"
    make_family(smaller, "llama", {"vocab_size": VOCAB_SIZE})
    save_tokenizer(smaller)
    check_greedy_texts(
        folder, oracle, {"num_blocks": 64, "speculative_config": {"model": str(smaller), "num_speculative_tokens": 3}}
    )


def test_a_model_with_states_does_not_draft(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"speculative_config\.model .*: layers of Lfm2ForCausalLM in .* keep a state"
    ):
        LLM(str(folder), num_blocks=16, speculative_config={"model": str(folder), "num_speculative_tokens": 3})
