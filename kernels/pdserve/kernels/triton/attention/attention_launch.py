"""Arguments that the launches of decode and prefill attention share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs
from pdserve.kernels.triton.attention.decode_pieces import PIECE_TOKENS

_LOG2E = math.log2(math.e)
_SMALLEST_DOT = 16
"""Rows and columns of the smallest matrix product of a GPU's tensor cores."""
_MASKED_KEYS = 64
"""Most keys of a prefill tile where heads are padded to a power of two."""


@dataclass(frozen=True, slots=True)
class HeadTile:
    """Sizes of the tiles for one spec over one cache. All but `group`, `prefill_heads` and `prefill_tokens` are powers of two."""

    group: int
    """G"""
    value_dim: int
    """Numbers of a value, padded: of the first part of a key."""
    rest_dim: int
    """Numbers of a latent row after its value, padded: of the second part of a key; 0: there are none."""
    piece_tokens: int
    """See `cut_into_pieces`."""
    decode_rows: int
    """Rows of a decode tile: G, padded, or a part of the heads over latent rows."""
    decode_keys: int
    decode_warps: int
    """At least one per 16 rows."""
    prefill_rows: int
    """Rows of a prefill tile: `prefill_heads` per token, and fewer than that unused ones."""
    prefill_heads: int
    """Query heads of a prefill tile: G, or a divisor of it over latent rows."""
    prefill_tokens: int
    """Tokens of a prefill tile."""
    prefill_keys: int
    prefill_registers: int | None
    """Limit of registers per thread; None: no limit."""
    precision: str
    """`ieee` keeps float32 exact; it has no effect on half precision."""


def head_tile(spec: AttentionSpec, kv_cache: Tensor, configs: AttentionConfigs) -> HeadTile:
    """The tile sizes of `configs`, reduced where a tile would not fit the registers: float32 gets a quarter of the rows and the
    fewest keys, padded heads get fewer keys. All query heads of a KV head are in one tile, but over latent rows, where they are
    many and wide."""
    group = spec.num_heads // spec.num_kv_heads
    is_latent = spec.value_dim is not None
    is_exact = kv_cache.dtype is torch.float32
    value_dim = _padded(spec.output_dim)
    rest = spec.head_dim - spec.output_dim
    decode_rows = _padded(group)
    prefill_rows = max(configs.prefill_rows // 4 if is_exact else configs.prefill_rows, _SMALLEST_DOT)
    if is_latent:
        decode_rows = _SMALLEST_DOT if is_exact or group <= _SMALLEST_DOT else configs.latent_heads
        prefill_heads = _latent_heads(group, prefill_rows)
    else:
        prefill_rows = max(prefill_rows, decode_rows)
        prefill_heads = group
    prefill_keys = configs.prefill_keys if value_dim == spec.output_dim else min(configs.prefill_keys, _MASKED_KEYS)
    return HeadTile(
        group=group,
        value_dim=value_dim,
        rest_dim=_padded(rest) if rest else 0,
        piece_tokens=_piece_tokens(spec, kv_cache),
        decode_rows=decode_rows,
        decode_keys=_SMALLEST_DOT if is_exact else configs.decode_keys,
        decode_warps=max(configs.decode_warps, decode_rows // 16),
        prefill_rows=prefill_rows,
        prefill_heads=prefill_heads,
        prefill_tokens=prefill_rows // prefill_heads,
        prefill_keys=_SMALLEST_DOT if is_exact else prefill_keys,
        prefill_registers=configs.max_registers if is_exact else configs.prefill_registers,
        precision="ieee" if is_exact else "tf32",
    )


def _padded(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), _SMALLEST_DOT)


def _latent_heads(group: int, rows: int) -> int:
    """The divisor of `group` that fills most of the rows of a tile with whole tokens; the largest of those."""
    divisors = [heads for heads in range(1, min(group, rows) + 1) if group % heads == 0]
    return max(divisors, key=lambda heads: (rows // heads * heads, heads))


def _piece_tokens(spec: AttentionSpec, kv_cache: Tensor) -> int:
    """So long that a piece's results, which are written and read in float32, have no more bytes than its keys and values."""
    result_bytes = 2 * 4 * spec.num_heads * spec.output_dim
    token_bytes = spec.num_kv_heads * kv_cache.shape[3] * spec.head_dim * kv_cache.element_size()
    return max(PIECE_TOKENS, int(triton.next_power_of_2(result_bytes // token_bytes)))


def softmax_scales(spec: AttentionSpec) -> tuple[float, float]:
    """`scale` and `softcap` of `add_tile`."""
    if spec.softcap is None:
        return spec.scale * _LOG2E, 0.0
    return spec.scale / spec.softcap * 2 * _LOG2E, spec.softcap * _LOG2E


def layer_strides(kv_cache: Tensor) -> tuple[int, int, int]:
    """Strides of a block, a head and a layer, in numbers."""
    block, head, layer = kv_cache.stride()[:3]
    return block, head, layer
