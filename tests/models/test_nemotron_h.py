"""Nemotron-H: weights as published checkpoints have them."""

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
SIZES: dict[str, Any] = {
    "hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12, "moe_latent_size": 32,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
"""Inputs of every matrix are a multiple of the numbers with one scale."""


def logits(folder: Path, **loading: Any) -> Tensor:
    with torch.inference_mode():
        return PagedRun(load_decoder(folder, dtype="float32", **loading), block_size=8).step({}, {"a": TOKENS})["a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    make_family(made, "nemotron_h", cases("nemotron_h")[0] | SIZES)
    return made


def rename(folder: Path, old: str, new: str, **added: Tensor) -> None:
    path = folder / "model.safetensors"
    weights = {name.replace(old, new, 1): weight for name, weight in load_file(path).items()}
    save_file(weights | added, path, metadata={"format": "pt"})


def test_the_body_has_either_prefix_and_draft_layers_are_not_read(folder: Path) -> None:
    before = logits(folder)
    assert "backbone.layers.0.norm.weight" in load_file(folder / "model.safetensors")
    rename(folder, "backbone.", "model.", **{"mtp.layers.0.mixer.q_proj.weight": torch.zeros(4, 4)})
    assert torch.equal(logits(folder), before)


def test_a_pattern_says_the_same_as_a_list(folder: Path) -> None:
    before = logits(folder)
    edit_json(folder / "config.json", layers_block_type=..., layer_types=..., hybrid_override_pattern="ME*M-ME")
    assert torch.equal(logits(folder), before)


@pytest.mark.parametrize("form", ["ModelOpt FP8", "NVFP4 of ModelOpt"])
@pytest.mark.parametrize("quantization", [None, "stored"])
def test_projections_of_scans_and_experts_are_stored_quantized(
    form: str, quantization: Any, folder: Path, tmp_path: Path
) -> None:
    """Those of attention, of Mamba 2, of MLPs, and into and out of the experts' size."""
    meant = quantize_folder(folder, FORMS[form])
    stored = set(load_file(folder / "model.safetensors"))
    scales = [name for name in stored if name.endswith("weight_scale")]
    for part in ("in_proj", "out_proj", "q_proj", "fc1_latent_proj", "experts.7.up_proj", "shared_experts.down_proj"):
        assert any(f"mixer.{part}." in name for name in scales), part
    found = logits(folder, quantization=quantization)
    edit_json(folder / "config.json", quantization_config=...)
    save_file(meant, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(found, logits(folder), atol=1e-4, rtol=1e-4)
