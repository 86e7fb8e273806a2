"""Arguments that the launches of decode and prefill attention share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs

_LOG2E = math.log2(math.e)
_SMALLEST_DOT = 16
"""Rows and columns of the smallest matrix product of a GPU's tensor cores."""
_MASKED_KEYS = 64
"""Most keys of a prefill tile where heads are padded to a power of two."""


@dataclass(frozen=True, slots=True)
class HeadTile:
    """Sizes of the tiles for one spec over one cache. All but `group` and `prefill_tokens` are powers of two."""

    group: int
    """G"""
    head_dim: int
    """D, padded."""
    group_rows: int
    """G, padded: rows of a decode tile."""
    decode_keys: int
    decode_warps: int
    """At least one per 16 rows."""
    prefill_rows: int
    """Rows of a prefill tile: G per token, and fewer than G unused ones."""
    prefill_tokens: int
    """Tokens of a prefill tile."""
    prefill_keys: int
    prefill_registers: int | None
    """Limit of registers per thread; None: no limit."""
    precision: str
    """`ieee` keeps float32 exact; it has no effect on half precision."""


def head_tile(spec: AttentionSpec, kv_cache: Tensor, configs: AttentionConfigs) -> HeadTile:
    """The tile sizes of `configs`, reduced where a tile would not fit the registers: float32 gets a quarter of the rows and the
    fewest keys, padded heads get fewer keys."""
    group = spec.num_heads // spec.num_kv_heads
    head_dim = max(triton.next_power_of_2(spec.head_dim), _SMALLEST_DOT)
    group_rows = max(triton.next_power_of_2(group), _SMALLEST_DOT)
    is_exact = kv_cache.dtype is torch.float32
    prefill_rows = max(configs.prefill_rows // 4 if is_exact else configs.prefill_rows, group_rows)
    prefill_keys = configs.prefill_keys if head_dim == spec.head_dim else min(configs.prefill_keys, _MASKED_KEYS)
    return HeadTile(
        group=group,
        head_dim=head_dim,
        group_rows=group_rows,
        decode_keys=_SMALLEST_DOT if is_exact else configs.decode_keys,
        decode_warps=max(configs.decode_warps, group_rows // 16),
        prefill_rows=prefill_rows,
        prefill_tokens=prefill_rows // group,
        prefill_keys=_SMALLEST_DOT if is_exact else prefill_keys,
        prefill_registers=configs.max_registers if is_exact else configs.prefill_registers,
        precision="ieee" if is_exact else "tf32",
    )


def softmax_scales(spec: AttentionSpec) -> tuple[float, float]:
    """`scale` and `softcap` of `add_tile`."""
    if spec.softcap is None:
        return spec.scale * _LOG2E, 0.0
    return spec.scale / spec.softcap * 2 * _LOG2E, spec.softcap * _LOG2E


def layer_strides(kv_cache: Tensor) -> tuple[int, int, int]:
    """Strides of a block, a head and a layer, in numbers."""
    block, head, layer = kv_cache.stride()[:3]
    return block, head, layer
