"""Widened weights against the code of the formats, compressed-tensors and bitsandbytes, which `make test-all` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pdserve.models.json_object import JsonObject
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.quantized.quantization_method import read_quantization
from tests.support.models.quantized_checkpoints import FORMS

pytestmark = pytest.mark.slow

SHAPE = (96, 256)
COMPRESSED = [name for name, form in FORMS.items() if form.config["quant_method"] == "compressed-tensors"]


def widened(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """What is read of one layer's tensors."""
    save_file({f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    method = read_quantization(JsonObject({"quantization_config": config}, "config.json"), folder)
    with open_weights(folder, method) as weights:
        return weights.read("layer.weight", SHAPE)


@pytest.mark.parametrize("name", [name for name in COMPRESSED if "order of activations" not in name])
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    form = FORMS[name]
    config = dict(form.config)
    stored, _ = form.store(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
    kind = {
        "pack-quantized": "PackedQuantizationCompressor",
        "nvfp4-pack-quantized": "NVFP4PackedCompressor",
        "mxfp4-pack-quantized": "MXFP4PackedCompressor",
        "float-quantized": "FloatQuantizationCompressor",
    }[config["format"]]
    scheme = quantization.QuantizationScheme(**config["config_groups"]["group_0"])
    theirs = getattr(compressors, kind).decompress({key: value.clone() for key, value in stored.items()}, scheme)[
        "weight"
    ]
    ours = widened(tmp_path, stored, config)
    # the package multiplies in the dtype of the scales, or in bfloat16
    exact = theirs.dtype is torch.float32
    assert torch.equal(ours.to(theirs.dtype), theirs) or not exact
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-6 if exact else 1e-2, atol=0)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    values, state = functional.quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=nested)
    described = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    ours = widened(tmp_path, {"weight": values} | described, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    torch.testing.assert_close(ours, functional.dequantize_4bit(values, state), rtol=1e-6, atol=1e-7)
