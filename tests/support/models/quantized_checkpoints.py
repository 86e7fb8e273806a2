"""Checkpoints whose matrices are stored in each quantized form, written number by number from what the forms are said to be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.checkpoints import edit_json

Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors by their endings after the layer's name, and the numbers that they stand for, in float32."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of eight, in the order of their bits."""


@dataclass(frozen=True)
class Form:
    """A way to store matrices."""

    config: Mapping[str, Any]
    """`quantization_config`."""
    store: Callable[[Tensor], Stored]
    extra: Callable[[str], dict[str, Tensor]] = field(default=lambda _: {})
    """Further tensors of a layer, by its name."""


def quantize_folder(folder: Path, form: Form, keep: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Store the projections of a folder in a form, but those whose names have a part of `keep`; all weights as they are meant."""
    stored, meant = load_file(folder / "model.safetensors"), {}
    for name, weight in list(stored.items()):
        if not name.endswith("_proj.weight") or any(part in name for part in keep):
            meant[name] = weight.clone()
            continue
        del stored[name]
        stem = name.removesuffix(".weight")
        tensors, meant[name] = form.store(weight.float())
        stored |= {f"{stem}.{ending}": tensor.contiguous() for ending, tensor in tensors.items()} | form.extra(stem)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=dict(form.config), dtype=config.get("dtype", "float32"))
    return meant


def eight_bit_floats(rows: int, columns: int, scale: str) -> Callable[[Tensor], Stored]:
    """One scale for each block; 0: for the whole dimension. scale: the ending of its name."""

    def store(weight: Tensor) -> Stored:
        height, width = rows or weight.shape[0], columns or weight.shape[1]
        tall, wide = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        scales = torch.empty(tall, wide)
        values, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for row in range(tall):
            for column in range(wide):
                place = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
                scales[row, column] = weight[place].abs().max() / 448
                values[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
                meant[place] = values[place].float() * scales[row, column]
        kept = scales if rows and columns else scales.reshape(-1, 1) if rows else scales.reshape(())
        return {"weight": values, scale: kept}, meant

    return store


def four_bit_floats(group: int, *, names: tuple[str, str, str] | None) -> Callable[[Tensor], Stored]:
    """NVFP4 with endings of numbers, scales and the scale of all; None: MXFP4, whose scales are exponents."""

    def store(weight: Tensor) -> Stored:
        groups = weight.reshape(weight.shape[0], -1, group)
        largest = groups.abs().amax(-1)
        if names is None:
            exponents = torch.ceil(torch.log2(largest / 6)).clamp(-127, 127)
            scales, stored = torch.exp2(exponents), (exponents + 127).to(torch.uint8)
            more: dict[str, Tensor] = {"weight_scale": stored}
            ending = "weight_packed"
        else:
            whole = largest.max() / (6 * 448)
            eight = (largest / 6 / whole).to(torch.float8_e4m3fn)
            divides = names[2] == "weight_global_scale"
            kept = (1 / whole if divides else whole).reshape(1 if divides else ())
            factor = (1.0 / float(kept)) if divides else float(kept)
            scales = eight.float() * factor
            ending = names[0]
            more = {names[1]: eight, names[2]: kept}
        table = torch.tensor(E2M1)
        codes = ((groups / scales[..., None]).abs()[..., None] - table).abs().argmin(-1)
        meant = table[codes] * groups.sign() * scales[..., None]
        codes = torch.where(groups.sign() < 0, codes + 8, codes).reshape(weight.shape)
        packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        return {ending: packed} | more, meant.reshape(weight.shape)

    return store


def integers(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values from 0 `[out, in]`, zeros and scales `[out, groups]`, and what they stand for; order: group of each input."""
    top = (1 << bits) - 1
    of_group = torch.arange(weight.shape[1]) // group if order is None else order
    count = int(of_group.max()) + 1
    values = torch.empty(weight.shape, dtype=torch.int64)
    zeros, scales = torch.empty(weight.shape[0], count, dtype=torch.int64), torch.empty(weight.shape[0], count)
    for index in range(count):
        part = weight[:, of_group == index]
        low, high = part.amin(1), part.amax(1)
        if symmetric:
            scale, zero = part.abs().amax(1) / (top // 2), torch.full((len(part),), (top + 1) // 2)
        else:
            scale = (high.clamp(min=0) - low.clamp(max=0)) / top
            zero = (-low.clamp(max=0) / scale).round().long()
        scale = scale.half().float()
        values[:, of_group == index] = ((part / scale[:, None]).round().long() + zero[:, None]).clamp(0, top)
        zeros[:, index], scales[:, index] = zero, scale
    meant = (values - zeros[:, of_group]).float() * scales[:, of_group]
    return values, zeros, scales, meant


def packed(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32, of which each holds 32 / bits numbers along a dimension, the first in the lowest bits, or in this order."""
    count = 32 // bits
    moved = numbers.movedim(dim, -1).numpy().astype(np.uint64)
    width = -(-moved.shape[-1] // count)
    words = np.zeros((*moved.shape[:-1], width), np.uint64)
    for word in range(width):
        for place in range(count):
            column = word * count + (order[place] if order else place)
            if column < moved.shape[-1]:
                words[..., word] |= moved[..., column] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32)).movedim(-1, dim)


def packed_rows(bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False) -> Callable[[Tensor], Stored]:
    """compressed-tensors."""

    def store(weight: Tensor) -> Stored:
        size = group or weight.shape[1]
        order = _shuffled(weight.shape[1], size) if shuffled else None
        values, zeros, scales, meant = integers(weight, bits, size, symmetric=symmetric, order=order)
        tensors = {
            "weight_packed": packed(values, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros, bits, 0)
        if order is not None:
            tensors["weight_g_idx"] = order.int()
        return tensors, meant

    return store


def gptq(
    bits: int, group: int, *, offset: int, shuffled: bool = False, symmetric: bool = False
) -> Callable[[Tensor], Stored]:
    """offset: subtracted from zeros as they are stored."""

    def store(weight: Tensor) -> Stored:
        order = _shuffled(weight.shape[1], group) if shuffled else None
        values, zeros, scales, _ = integers(weight, bits, group, symmetric=symmetric, order=order)
        # the first form cannot store 0
        zeros = zeros.clamp(min=offset)
        of_group = torch.arange(weight.shape[1]) // group if order is None else order
        meant = (values - zeros[:, of_group]).float() * scales[:, of_group]
        return {
            "qweight": packed(values.t(), bits, 0),
            "qzeros": packed(zeros.t() - offset, bits, 1),
            "scales": scales.t().half(),
            "g_idx": of_group.int(),
        }, meant

    return store


def awq(group: int) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        values, zeros, scales, meant = integers(weight, 4, group, symmetric=False)
        return {
            "qweight": packed(values.t(), 4, 1, _AWQ), "qzeros": packed(zeros.t(), 4, 1, _AWQ), "scales": scales.t().half(),
        }, meant  # fmt: skip

    return store


def bitsandbytes(*, nested: bool) -> Callable[[Tensor], Stored]:
    """NF4 in blocks of 64 numbers; nested: their largest magnitudes are stored in eight bits."""

    def store(weight: Tensor) -> Stored:
        table = torch.linspace(-1, 1, 16)
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {"weight.quant_map": table}
        if nested:
            offset = float(largest.mean())
            inner = torch.linspace(-1, 1, 256)
            count = -(-len(largest) // 256)
            moved = torch.nn.functional.pad(largest - offset, (0, count * 256 - len(largest))).reshape(count, 256)
            outer = moved.abs().amax(1)
            codes = ((moved / outer[:, None]).flatten()[: len(largest), None] - inner).abs().argmin(1)
            largest = inner[codes] * outer.repeat_interleave(256)[: len(largest)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            tensors |= {
                "weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": outer, "weight.nested_quant_map": inner,
            }  # fmt: skip
        else:
            tensors["weight.absmax"] = largest
        codes = ((blocks / largest[:, None])[..., None] - table).abs().argmin(-1)
        meant = (table[codes] * largest[:, None]).reshape(weight.shape)
        flat = codes.flatten()
        tensors["weight"] = ((flat[::2] << 4) | flat[1::2]).to(torch.uint8).reshape(-1, 1)
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return tensors, meant

    return store


def _shuffled(columns: int, group: int) -> Tensor:
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(0))]


def compressed(form: str, bits: int, kind: str, strategy: str, **fields: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors with one group."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | fields
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"], "kv_cache_scheme": None,
    }  # fmt: skip


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
FORMS: Mapping[str, Form] = {
    "fp8 in blocks": Form(_FP8 | {"weight_block_size": [16, 32]}, eight_bit_floats(16, 32, "weight_scale_inv")),
    "fp8 in uneven blocks": Form(_FP8 | {"weight_block_size": [24, 40]}, eight_bit_floats(24, 40, "weight_scale_inv")),
    "fp8 per tensor": Form(
        _FP8 | {"activation_scheme": "static"}, eight_bit_floats(0, 0, "weight_scale"),
        lambda stem: {f"{stem}.input_scale": torch.tensor(0.5)},
    ),
    "fp8 per channel": Form({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, eight_bit_floats(1, 0, "weight_scale")),
    "ModelOpt FP8": Form(
        _MODELOPT | {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, eight_bit_floats(0, 0, "weight_scale"),
        lambda stem: {f"{stem}.input_scale": torch.tensor(0.5)}
        | ({f"{stem}.{stem[-6]}_scale": torch.tensor(0.1)} if stem.endswith(("k_proj", "v_proj")) else {}),
    ),
    "NVFP4 of ModelOpt": Form(
        _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
        four_bit_floats(16, names=("weight", "weight_scale", "weight_scale_2")),
        lambda stem: {f"{stem}.input_scale": torch.tensor(0.5)},
    ),
    "NVFP4 of compressed-tensors": Form(
        compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
        four_bit_floats(16, names=("weight_packed", "weight_scale", "weight_global_scale")),
        lambda stem: {f"{stem}.input_global_scale": torch.tensor([3.0])},
    ),
    "MXFP4 of compressed-tensors": Form(
        compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32), four_bit_floats(32, names=None)
    ),
    "W4A16": Form(compressed("pack-quantized", 4, "int", "group", group_size=32), packed_rows(4, 32)),
    "W4A16 asymmetric": Form(
        compressed("pack-quantized", 4, "int", "group", group_size=16, symmetric=False), packed_rows(4, 16, symmetric=False)
    ),
    "W4A16 in order of activations": Form(
        compressed("pack-quantized", 4, "int", "group", group_size=16, actorder="group"), packed_rows(4, 16, shuffled=True)
    ),
    "W8A16 per channel": Form(compressed("pack-quantized", 8, "int", "channel"), packed_rows(8, 0)),
    "fp8 of compressed-tensors in blocks": Form(
        compressed("float-quantized", 8, "float", "block", block_structure=[16, 32]), eight_bit_floats(16, 32, "weight_scale")
    ),
    "AWQ": Form({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}, awq(16)),
    "GPTQ": Form(_GPTQ, gptq(4, 16, offset=1)),
    "GPTQ in order of activations": Form(_GPTQ | {"desc_act": True, "group_size": 32}, gptq(4, 32, offset=1, shuffled=True)),
    "GPTQ, second form": Form(_GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 16, offset=0)),
    "GPTQ of 8 bits": Form(_GPTQ | {"bits": 8, "group_size": 32}, gptq(8, 32, offset=1, symmetric=True)),
    "GPTQ of 2 bits": Form(_GPTQ | {"bits": 2}, gptq(2, 16, offset=1)),
    "bitsandbytes": Form({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes(nested=False)),
    "bitsandbytes, nested": Form({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes(nested=True)),
}  # fmt: skip
