"""A KV cache of eight bits: logits against `transformers` with the same rounding, and against a cache that rounds nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.pool.memory_needs import memory_needs
from pdserve.models.loading import load_decoder
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.checkpoints import ARCHITECTURES
from tests.support.models.rounded_keys import rounded_keys

TOKENS = prompt_of(37)


@pytest.mark.parametrize(
    ("architecture", "stored"), [*((name, "int8") for name in ARCHITECTURES), ("llama", "float8_e4m3fn")]
)
def test_logits_are_those_of_transformers_with_the_same_rounding(
    architecture: str, stored: str, tiny_checkpoints: Callable[..., Path], paged_run: Callable[..., Any]
) -> None:
    folder = tiny_checkpoints(architecture)
    decoder = load_decoder(folder)
    run = paged_run(decoder, cache_dtype=stored, block_size=4)
    # the second chunk reads the first from the cache, then single tokens read both
    parts = [run.step({}, {"a": TOKENS[:15]})["a"], run.step({}, {"a": TOKENS[15:33]})["a"]]
    ours = torch.cat(parts + [run.step({"a": token}, {})["a"] for token in TOKENS[33:]])
    exact: Tensor = paged_run(decoder).step({}, {"a": TOKENS})["a"]
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode(), rounded_keys(stored):
        [expected] = oracle(torch.tensor([TOKENS])).logits
    # a number between two steps may be rounded to either; that is far less than what rounding changes in all
    assert (ours - expected).norm() < 0.2 * (exact - expected).norm()
    assert 0 < (exact - expected).norm() < {"int8": 0.05, "float8_e4m3fn": 0.2}[stored] * exact.norm()


def test_a_pool_is_counted_as_it_is_made(tiny_checkpoints: Callable[..., Path]) -> None:
    folder = tiny_checkpoints("llama")
    for kv_cache_dtype in ("auto", "int8", "fp8"):
        settings = WorkerSettings(model=str(folder), num_blocks=20, kv_cache_dtype=kv_cache_dtype)
        [kv_cache] = load_model(folder, settings).kv_caches
        assert memory_needs(folder, settings).pool == kv_cache.nbytes


def test_caches_of_one_format_share_blocks_and_others_do_not(tiny_checkpoints: Callable[..., Path]) -> None:
    folder = tiny_checkpoints("llama")
    names: tuple[Any, ...] = ("auto", "int8", "fp8", "int8_per_token_head", "fp8_e4m3", "fp8_per_token_head")
    plain, int8, fp8, *others = (
        load_model(folder, WorkerSettings(model=str(folder), num_blocks=4, kv_cache_dtype=name)).layout
        for name in names
    )
    assert others == [int8, fp8, fp8]
    assert len({each.model_fingerprint for each in (plain, int8, fp8)}) == 3
    assert any("dtype" in difference for difference in int8.differences(fp8))


def test_heads_without_room_for_aligned_scales_are_refused(tiny_checkpoints: Callable[..., Path]) -> None:
    folder = tiny_checkpoints("llama", head_dim=6)
    settings = WorkerSettings(model=str(folder), num_blocks=4, kv_cache_dtype="int8")
    for refused in (lambda: load_model(folder, settings), lambda: memory_needs(folder, settings)):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype int8 needs heads of a multiple of 4 numbers, .* have 6"):
            refused()
