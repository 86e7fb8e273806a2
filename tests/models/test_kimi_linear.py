"""Kimi Linear: configurations and weights as published checkpoints have them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.models.loading import load_decoder
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import VOCAB_SIZE, edit_json
from tests.support.models.family_checkpoints import cases, make_family
from tests.support.models.quantized_checkpoints import FORMS, quantize_folder

TOKENS = random.Random(0).choices(range(VOCAB_SIZE), k=20)
SIZES: dict[str, Any] = {"moe_intermediate_size": 32, "linear_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 48}
"""Inputs of every matrix but that after latent attention are a multiple of 16."""


def logits(folder: Path, **loading: Any) -> Tensor:
    with torch.inference_mode():
        return PagedRun(load_decoder(folder, dtype="float32", **loading), block_size=8).step({}, {"a": TOKENS})["a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    make_family(made, "kimi_linear", cases("kimi_linear")[0] | SIZES)
    return made


def test_published_names_say_the_same(folder: Path) -> None:
    before = logits(folder)
    edit_json(
        folder / "config.json",
        layer_types=..., mlp_layer_types=..., linear_num_heads=..., linear_head_dim=..., linear_conv_kernel_dim=...,
        first_k_dense_replace=1, mla_use_nope=True,
        linear_attn_config={
            "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 4], "full_attn_layers": [3],
        },
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    assert f"{dense}up_proj.weight" in weights
    published = {name.replace(dense, "model.layers.0.mlp."): weight for name, weight in weights.items()}
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(folder), before)


def test_every_fourth_layer_has_attention_where_nothing_says_it(folder: Path) -> None:
    edit_json(folder / "config.json", layer_types=..., num_hidden_layers=9, mlp_layer_types=...)
    config = load_decoder(folder, device="meta", load_format="dummy").config
    assert [layer for layer in range(9) if not config.has_state(layer)] == [4, 8]


@pytest.mark.parametrize("form", ["ModelOpt FP8", "fp8 in blocks"])
@pytest.mark.parametrize("quantization", [None, "stored"])
def test_projections_are_stored_quantized(form: str, quantization: Any, folder: Path) -> None:
    meant = quantize_folder(folder, FORMS[form])
    found = logits(folder, quantization=quantization)
    edit_json(folder / "config.json", quantization_config=...)
    save_file(meant, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(found, logits(folder), atol=1e-4, rtol=1e-4)
