"""`gguf_tensors`: the weights of a GGUF file by the names that a model folder has for them.

Source of the names and of the changes to the numbers: llama.cpp, whose converter writes the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache

import msgspec
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.gguf.gguf_config import GgufArchitecture
from pdserve.models.gguf.gguf_file import BLOCKS, GgufFile, StoredTensor

INDEX_FILE = "model.gguf.json"
"""Name of the file with a `GgufIndex` in a model folder."""
_INTEGERS = tuple(f"I{num_bits}" for num_bits in (8, 16, 32, 64))
"""Types that no weight of a model has."""
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_ROUTER = "ffn_gate_inp"
_IN_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"})
"""Tensors whose numbers are in config.json."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GgufWeight(msgspec.Struct, frozen=True):
    """A weight of a model folder, as rows of blocks in a file."""

    file: str
    type: str
    """Name of the type of its blocks."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the file."""
    permuted_heads: int = 0
    """Number of heads whose rows are stored in the order of pairs that are rotated together; 0: they are not."""
    added: float = 0.0
    """Was added to every number."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which has the numbers of the last dimension."""
        block, size = BLOCKS[self.type]
        return self.shape[-1] // block * size

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufIndex(msgspec.Struct, frozen=True):
    """The weights of a folder's GGUF files."""

    weights: dict[str, GgufWeight]


def gguf_index(file: GgufFile, architecture: GgufArchitecture, config: Mapping[str, object]) -> GgufIndex:
    """files: named as in a folder by `folder_files`. Raises: ConfigError; UnsupportedModel for a type that is not read."""
    weights: dict[str, GgufWeight] = {}
    names = folder_files(len(file.paths))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for stored_name, tensor in file.tensors.items():
        if stored_name in _IN_CONFIG:
            continue
        where = f"{file.paths[tensor.file]}: tensor {stored_name[:80]}"
        if not _is_read(tensor.type):
            raise UnsupportedModel(f"{where} has type {tensor.type}, which is not read")
        part = (found := _NAME.fullmatch(stored_name)) and found[2]
        permuted = heads.get(part or "", 0) if architecture.permutes_heads else 0
        added = architecture.norm_offset if part is not None and part.endswith("norm") else 0.0
        for name, piece in _named(stored_name, tensor, architecture, where):
            if name in weights:
                raise ConfigError(f"{where} is stored twice")
            weights[name] = GgufWeight(
                names[tensor.file], tensor.type, piece.shape, piece.offset, int(str(permuted)), added
            )
    return GgufIndex(weights)


@cache
def _is_read(kind: str) -> bool:
    """True if numbers of this type can be widened."""
    if kind in _INTEGERS:
        return False
    try:
        dequantize(np.zeros((1, BLOCKS[kind][1]), np.uint8), GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


def folder_files(count: int) -> list[str]:
    """Names of a model's GGUF files in its folder."""
    if count == 1:
        return ["model.gguf"]
    return [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _named(
    stored_name: str, tensor: StoredTensor, architecture: GgufArchitecture, where: str
) -> Iterator[tuple[str, StoredTensor]]:
    """The weights of a tensor: one, or one per expert. A name that has no place stays as it is, and loading refuses it."""
    found = _NAME.fullmatch(stored_name)
    if found is None:
        yield stored_name, tensor
        return
    layer, part, kind = found.groups()
    if layer is None:
        yield (f"{_ENDS[part]}.{kind}" if part in _ENDS else stored_name), tensor
        return
    prefix = f"model.layers.{layer}"
    if part in _EXPERTS and architecture.experts is not None:
        mixture, projections = architecture.experts
        if len(tensor.shape) != 3:
            raise ConfigError(f"{where} has shape {list(tensor.shape)}, three dimensions are expected")
        count, rows, columns = tensor.shape
        for expert in range(count):
            offset = tensor.offset + expert * rows * tensor.row_bytes
            name = f"{prefix}.{mixture}.experts.{expert}.{projections[_EXPERTS.index(part)]}.{kind}"
            yield name, StoredTensor(tensor.file, tensor.type, (rows, columns), offset)
        return
    if part == _ROUTER and architecture.experts is not None:
        yield f"{prefix}.{architecture.experts[0]}.gate.{kind}", tensor
        return
    served = architecture.layer_names.get(part) or _LAYER.get(part)
    yield (stored_name if served is None else f"{prefix}.{served}.{kind}"), tensor
