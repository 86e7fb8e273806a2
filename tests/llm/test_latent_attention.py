"""Latent attention offline: greedy texts of transformers with all that an engine does to sequences, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.llm import LLM
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_latent_model
from tests.support.models.offline_texts import GREEDY, PROMPTS, check_forks, check_greedy_texts
from tests.support.models.oracle import Oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latent_model(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 17},
        {"block_size": 16, "num_blocks": 13, "max_num_seqs": 4},
        {
            "num_blocks": 64,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        },
        {"num_blocks": 8, "kv_host_mib": 4},
        {"num_blocks": 64, "tensor_parallel_size": 2},
    ],
    ids=["chunks", "preemption", "drafts", "host memory", "ranks"],
)
def test_greedy_texts(folder: Path, oracle: Oracle, options: dict[str, Any]) -> None:
    check_greedy_texts(folder, oracle, options)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 17},
        pytest.param({"block_size": 16, "num_blocks": 13, "max_num_seqs": 4}, marks=pytest.mark.slow),
        pytest.param({"num_blocks": 64, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["chunks", "preemption", "ranks"],
)
def test_two_attentions_per_layer(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_latent_model(tmp_path, "longcat_flash")
    oracle = Oracle(folder)
    check_greedy_texts(folder, oracle, options)


def test_forks_and_log_probabilities(folder: Path, oracle: Oracle) -> None:
    check_forks(folder, oracle)


def test_layers_that_draft_are_not_read(folder: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Published checkpoints have them after the last layer."""
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights |= {"model.layers.4.eh_proj.weight": torch.ones(2, 2), "model.layers.4.enorm.weight": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(tmp_path), dtype="float32", num_blocks=64) as llm:
        [answer] = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    oracle.check(PROMPTS[0], list(answer.outputs[0].token_ids))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_each_back_end_of_a_cpu(folder: Path, oracle: Oracle, backend: str) -> None:
    """With chunks that are expanded, chunks that are not, and decode rows in one step."""
    prompts = [*PROMPTS, prompt_of(90, 11)]
    with LLM(
        str(folder), dtype="float32", attention_backend=backend, block_size=4, num_blocks=256, max_num_batched_tokens=40
    ) as llm:
        for prompt, answer in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            oracle.check(prompt, list(answer.outputs[0].token_ids))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"enable_lora": True},
            UnsupportedModel,
            "the attention of DeepseekV3ForCausalLM takes no adapters",
        ),
        (
            {"kv_cache_dtype": "int8"},
            ConfigError,
            "kv_cache_dtype int8 rounds keys and values, and Deepseek",
        ),
    ],
)
def test_what_latent_rows_do_not_have_is_refused_by_name(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(folder), num_blocks=16, **options)


def test_a_pool_has_one_row_per_token_and_layer(folder: Path) -> None:
    """Expanded keys and values would take 4 heads of 20 and 10 numbers, the row takes 28."""
    settings = DecodeSettings(model=str(folder), num_blocks=100, dtype="float32")
    assert memory_needs(folder, settings).pool == 100 * 16 * 4 * (20 + 8) * 4


def test_a_pool_has_a_row_for_each_attention(tmp_path: Path) -> None:
    """The configuration has 2 layers."""
    folder = make_latent_model(tmp_path, "longcat_flash")
    assert json.loads((folder / "config.json").read_text())["num_layers"] == 2
    settings = DecodeSettings(model=str(folder), num_blocks=100, dtype="float32")
    assert memory_needs(folder, settings).pool == 100 * 16 * 4 * (20 + 8) * 4
