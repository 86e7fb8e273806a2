"""Checkpoints in compressed-tensors' format, against `transformers` on the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.engine.runner.pool.memory_needs import weight_bytes
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from pdserve.models.weights import weight_loader
from tests.support.models.checkpoints import edit_json, make_checkpoint
from tests.support.models.rounded_products import rounded_products

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43]
WEIGHTS = "model.safetensors"
LARGEST = {"int8": 127, "float8": 448}
STORED = {"int8": torch.int8, "float8": torch.float8_e4m3fn}


def quantization_config(values: str, *, inputs: dict[str, Any] | None, strategy: str = "channel") -> dict[str, Any]:
    kind = values.removesuffix("8")
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {},
    }  # fmt: skip


def per_token(kind: str = "int", **fields: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True} | fields


def quantize(
    folder: Path, values: str, strategy: str, extra: Callable[[str], dict[str, Tensor]] = lambda _: {}
) -> None:
    """Replace the projections of a folder by quantized ones, with scales, and write what they stand for beside it."""
    stored, meant = load_file(folder / WEIGHTS), load_file(folder / WEIGHTS)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight = stored[name]
        ranges = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().reshape(1)
        scales = (ranges / LARGEST[values]).bfloat16()
        # the scale as it is stored; its rounding may move the largest number beyond the range
        divided = (weight / scales.float()).clamp(-LARGEST[values], LARGEST[values])
        stored[name] = (divided.round() if values == "int8" else divided).to(STORED[values])
        stored[f"{name}_scale"] = scales
        stored |= extra(name)
        meant[name] = stored[name].float() * scales.float()
    twin = folder.with_name("meant")
    twin.mkdir()
    for path in folder.iterdir():
        (twin / path.name).write_bytes(path.read_bytes())
    save_file(meant, twin / WEIGHTS, metadata={"format": "pt"})
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def make(
    tmp_path: Path, values: str, *, inputs: dict[str, Any] | None, strategy: str = "channel", **given: Any
) -> Path:
    folder = make_checkpoint(tmp_path / "model", given.pop("architecture", "qwen2"))
    quantize(folder, values, strategy, **given)
    edit_json(folder / "config.json", quantization_config=quantization_config(values, inputs=inputs, strategy=strategy))
    return folder


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("values", ["int8", "float8"])
def test_widened_weights_are_those_that_the_file_stands_for(
    values: str, strategy: str, tmp_path: Path, paged_run: Callable[..., Any]
) -> None:
    folder = make(tmp_path, values, inputs=None, strategy=strategy)
    ours, meant = (paged_run(load_decoder(path)).step({}, {"a": TOKENS})["a"] for path in (folder, tmp_path / "meant"))
    assert torch.equal(ours, meant)
    assert weight_bytes(folder, "float32") == weight_bytes(tmp_path / "meant", "float32")


@pytest.mark.few(1)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_inputs_of_int8_weights_are_rounded_per_token(
    architecture: str, tmp_path: Path, paged_run: Callable[..., Any]
) -> None:
    folder = make(tmp_path, "int8", inputs=per_token(), architecture=architecture)
    ours, meant = (paged_run(load_decoder(path)).step({}, {"a": TOKENS})["a"] for path in (folder, tmp_path / "meant"))
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path / "meant", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.inference_mode(), rounded_products(oracle, weights=False):
        [expected] = oracle(torch.tensor([TOKENS])).logits
    # a number between two steps may be rounded to either
    assert (ours - expected).norm() < 0.1 * (meant - expected).norm()
    assert weight_bytes(folder, "float32") < 0.6 * weight_bytes(tmp_path / "meant", "float32")


def test_a_static_scale_of_float8_inputs_is_not_needed(tmp_path: Path, paged_run: Callable[..., Any]) -> None:
    static = per_token("float", strategy="tensor", dynamic=False)
    folder = make(
        tmp_path, "float8", inputs=static, strategy="tensor",
        extra=lambda name: {f"{name.removesuffix('weight')}input_scale": torch.tensor([0.02])},
    )  # fmt: skip
    ours, meant = (paged_run(load_decoder(path)).step({}, {"a": TOKENS})["a"] for path in (folder, tmp_path / "meant"))
    assert torch.equal(ours, meant)


def _change(folder: Path, **changes: Tensor | None) -> None:
    weights = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    for name, tensor in changes.items():
        full = f"model.layers.1.self_attn.{name}"
        weights.pop(full)
        if tensor is not None:
            weights[full] = tensor
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_proj.weight_scale": torch.ones(3, 1)}, r"weight_scale has shape \[3, 1\], \[\] or \[64, 1\] is"),
        ({"q_proj.weight_scale": torch.zeros(64, 1)}, r"q_proj\.weight_scale has a scale that is not a positive number"),
        ({"q_proj.weight_scale": torch.full((64, 1), torch.nan)}, r"weight_scale has a scale that is not a positive number"),
        ({"q_proj.weight_scale": None}, r"q_proj\.weight has dtype I8; read are F32, BF16, F16"),
        ({"q_proj.weight": torch.ones(64, 64)}, r"q_proj\.weight has dtype F32; read are I8"),
        (
            {"q_proj.weight": torch.ones(64, 64), "q_proj.weight_scale": None},
            r"some of .*q_proj, .*k_proj, .*v_proj are quantized and some are not",
        ),
    ],
)  # fmt: skip
def test_a_broken_file_is_one_sentence(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make(tmp_path, "int8", inputs=per_token())
    _change(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_decoder(folder)


def _edited(**edits: Any) -> dict[str, Any]:
    """A readable configuration with other values; names with __ reach into the group."""
    config = quantization_config("int8", inputs=per_token())
    for path, value in edits.items():
        *way, last = path.split("__")
        place = config if path in (*config, "transform_config") else config["config_groups"]["group_0"]
        for step in way:
            place = place[step]
        place[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_edited(format="marlin-24"), "format is 'marlin-24'; read are int-quantized, float-quantized"),
        (_edited(format="float-quantized"), "8 bits of type int, which format float-quantized does not have"),
        (_edited(transform_config={"a": 1}), "transform_config is set"),
        (_edited(config_groups={}), "config_groups"),
        (_edited(weights=None), "weights"),
        (_edited(weights__num_bits=4), "4 bits of type int, which format int-quantized does not have"),
        (_edited(weights__symmetric=False), "symmetric is false; read is true"),
        (_edited(weights__strategy="token"), 'strategy is "token"; read is tensor, channel, group, block'),
        (_edited(weights__type="complex"), "8 bits of type complex, which format int-quantized does not have"),
        (_edited(input_activations__dynamic=False), 'strategy "token", dynamic false; inputs of int8 weights are rounded per'),
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object with 1 to 64 groups"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises((UnsupportedModel, ConfigError), match=message):
        read_config(folder)


def test_other_settings_do_not_fit(tmp_path: Path) -> None:
    folder = make(tmp_path, "int8", inputs=per_token())
    with pytest.raises(ConfigError, match=r"quantization is .int8., but the weights of .* are stored quantized"):
        load_decoder(folder, quantization="int8")
    with pytest.raises(ConfigError, match="load_format is 'dummy', but the weights"):
        load_decoder(folder, load_format="dummy")
    with pytest.raises(UnsupportedModel, match=r"quantization is 'fp8': .* from sm_89 on, not cpu"):
        load_decoder(folder, quantization="fp8")


def test_fp8_needs_a_matrix_in_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_loader, "multiplies_float8", lambda *_: True)
    with pytest.raises(
        ConfigError, match=r"quantization is 'fp8', but .* is stored quantized, and no matrix in float8"
    ):
        load_decoder(make(tmp_path, "int8", inputs=None), quantization="fp8")
