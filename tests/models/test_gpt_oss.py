"""gpt-oss: experts in MXFP4, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.loading import load_decoder
from pdserve.models.weights.checkpoint import open_checkpoint
from pdserve.models.weights.quantized.four_bit_floats import StackedFourBitFloats
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import edit_json
from tests.support.models.family_checkpoints import make_family

FIELDS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 13, "num_hidden_layers": 2}
TOKENS = list(range(30, 70))


def _packed(folder: Path) -> torch.Tensor:
    """Make a checkpoint, and replace the matrices of its experts by random MXFP4; the logits of transformers with these."""
    model = make_family(folder, "gpt_oss", FIELDS)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    unpacked_weights = {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 127, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked_weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["x"]})
    missing = model.load_state_dict(unpacked_weights, strict=False)
    assert not missing.unexpected_keys
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def test_experts_in_mxfp4_are_unpacked_as_in_transformers(tmp_path: Path) -> None:
    expected = _packed(tmp_path)
    logits = PagedRun(load_decoder(tmp_path)).step({}, {"a": TOKENS})["a"]
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)


def test_every_number_of_mxfp4(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.arange(118, 134, dtype=torch.uint8).view(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        found = StackedFourBitFloats(checkpoint, "w_blocks", "w_scales", ["w_blocks", "w_scales"])
        assert torch.equal(found.rows(0, 1), expected)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"load_format": "dummy"}, "load_format is 'dummy', but the weights of .* are stored quantized"),
        ({}, {"quantization": "int8"}, "quantization is 'int8', but the weights of .* are stored quantized"),
        (
            {"intermediate_size": 100},
            {},
            r"gate_up_proj_blocks stands for shape \[4, 64, 192\], config.json says \[4, 64, 200\]",
        ),
        ({"experts_per_token": 3}, {}, r"experts_per_token must be num_experts_per_tok \(2\), not 3"),
        ({"swiglu_limit": 0}, {}, "swiglu_limit must be a positive number, not 0"),
        ({"quantization_config": None}, {}, r"gate_up_proj is in none of model\.safetensors"),
        ({"quantization_config": {"quant_method": "quark"}}, {}, "weights are quantized by quark"),
        ({"num_local_experts": 3}, {}, r"router\.weight has shape \[4, 64\], config\.json says \[3, 64\]"),
        ({"rope_scaling": {"rope_type": "spiral"}, "rope_parameters": None}, {}, "rope type 'spiral'"),
    ],
)
def test_broken_checkpoints_are_refused_by_name(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _packed(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        load_decoder(tmp_path, **options)


def test_the_default_rotary_embedding_is_that_of_the_family(tmp_path: Path) -> None:
    make_family(tmp_path, "gpt_oss", FIELDS)
    given = load_decoder(tmp_path).config
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"
    edit_json(tmp_path / "config.json", rope_parameters=...)
    assert load_decoder(tmp_path).config == given
