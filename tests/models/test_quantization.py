"""int8 weights, rounded at loading: against `transformers` with the same rounding, and against the model without any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.pool.memory_needs import weight_bytes
from pdserve.llm import LLM, SamplingParams
from pdserve.models.loading import load_decoder
from tests.support.models.checkpoints import ARCHITECTURES, make_checkpoint
from tests.support.models.rounded_products import rounded_products

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers_with_the_same_rounding(
    architecture: str, tmp_path: Path, paged_run: Callable[..., Any]
) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    ours, exact = (
        paged_run(load_decoder(folder, quantization=quantization)).step({}, {"a": TOKENS})["a"]
        for quantization in ("int8", None)
    )
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.inference_mode(), rounded_products(oracle):
        [expected] = oracle(torch.tensor([TOKENS])).logits
    # a number between two steps may be rounded to either; that is far less than what rounding changes in all
    assert (ours - expected).norm() < 0.1 * (exact - expected).norm()
    assert (exact - expected).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_memory_is_counted_as_it_is_kept(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    plain, int8 = (weight_bytes(folder, "float32", quantization=each) for each in (None, "int8"))
    matrices = [each for name, each in load_file(folder / "model.safetensors").items() if name.endswith("_proj.weight")]
    assert plain - int8 == sum(3 * each.numel() - 4 * len(each) for each in matrices)


def test_workers_with_other_roundings_share_no_blocks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    plain, *rounded = (
        load_model(
            folder, msgspec.structs.replace(WorkerSettings(model=str(folder), num_blocks=4), quantization=quantization)
        ).layout.model_fingerprint
        for quantization in ("auto", "int8", "int8")
    )
    assert plain != rounded[0] == rounded[1]


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'int8', .* device is 'cuda:0'"):
        WorkerSettings(model="demo", quantization="int8", device="cuda:0").verify()


def test_the_bundled_model_answers() -> None:
    with LLM("demo", quantization="int8", num_blocks=64) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        [output] = llm.chat(messages, SamplingParams(max_tokens=20, temperature=0))
    assert output.outputs[0].text == "The capital of France is Paris."
