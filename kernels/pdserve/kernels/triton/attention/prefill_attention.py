"""Attention of prompt chunks over their pages, all chunks of a step in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs
from pdserve.kernels.triton.attention.attention_launch import head_tile, layer_strides, softmax_scales
from pdserve.kernels.triton.attention.softmax_tile import LOG2E, add_tile, load_bias, load_queries, load_tile
from pdserve.kernels.triton.launch_configs import register_limit


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """First key that a row at this position sees, below 0 where a window reaches so far. CHUNKED: WINDOW is the size of a chunk."""
    if CHUNKED:
        return position // WINDOW * WINDOW
    return position - WINDOW + 1


@triton.jit
def add_tiles(
    q, q_rest, keys, tables, position, begin, end, first_key, last_key, best, total, acc, scale, softcap, block_stride,
    distance_bias, num_columns, heads, of_row,
    D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`(best, total, acc)` with tiles `begin..end-1` of the sequence's keys. Without MASKED every row sees all of them. Keys before
    `first_key`, which no row sees, are not read: their blocks may be others'. With BIAS the rows are of these heads."""
    n = tl.arange(0, BLOCK_N)
    for tile in range(begin, end):
        at = tile * BLOCK_N + n
        k, rest, v = load_tile(
            keys, tables, at, first_key, last_key, block_stride, D, DV, LATENT, BS, BLOCK_D, BLOCK_R, MASKED
        )
        seen = (at < last_key)[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (at[None, :] >= first_seen(position, WINDOW, CHUNKED)[:, None])
        bias = 0.0
        if BIAS:
            bias = load_bias(distance_bias, num_columns, heads, of_row, position[:, None] - at[None, :])
        best, total, acc = add_tile(
            q, q_rest, k, rest, v, seen, bias, best, total, acc, scale, softcap, BLOCK_R, MASKED, SOFTCAP, BIAS, PRECISION
        )  # fmt: skip
    return best, total, acc


@triton.jit(do_not_specialize=["layer"])
def attend_tiles(
    q, pages, tables, tiles, out, lse, sinks, distance_bias, num_columns, layer, scale, softcap,
    q_token_stride, q_head_stride, block_stride, head_stride, layer_stride, table_stride, lse_token_stride, lse_head_stride,
    HKV: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr,
    BS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, JOIN: tl.constexpr,
    SINKS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`softmax(cap(scale q k^T) + bias + mask) v` of one tile: BLOCK_M // H tokens with H of the G query heads of one KV head each.

    So keys are read once for H heads, a divisor of G. tiles `[n, 5]` are of `cut_into_tiles`. Keys are visited in order; only the
    tiles at the edges of what the rows see need a mask. DV and LATENT: see `load_tile`. WINDOW 0: none; CHUNKED: see
    `first_seen`. With JOIN,
    out `[T, Hq, DV]` already has the result over other keys, with the natural logarithm of its denominators in lse, and becomes the
    result over both. With SINKS and without JOIN, a head's number in sinks `[Hq]` is one more score, whose weight goes to no value.
    distance_bias: `[Hq, num_columns]`, with BIAS. Reference: `attend_prefill`.
    """
    tile = tiles + tl.program_id(0) * 5
    head = tl.program_id(1) // (G // H)
    sequence = tl.load(tile)
    first_row = tl.load(tile + 1)
    num_rows = tl.load(tile + 2)
    first_position = tl.load(tile + 3)
    seq_len = tl.load(tile + 4)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // H
    heads = tl.program_id(1) * H + m % H
    # a tile has at most BLOCK_M // H tokens: where H is no power of two its last rows would be another tile's
    of_row = token < num_rows
    here = of_row[:, None] & (d < DV)[None, :]
    rows = (first_row + token).to(tl.int64)
    q_rows = q + rows[:, None] * q_token_stride + heads[:, None] * q_head_stride
    queries, q_rest = load_queries(q_rows, of_row, D, DV, BLOCK_D, BLOCK_R)
    position = first_position + token
    keys = pages + layer.to(tl.int64) * layer_stride + head * head_stride
    table = tables + sequence.to(tl.int64) * table_stride

    last_key = first_position + num_rows if CAUSAL else seq_len
    end = tl.cdiv(last_key, BLOCK_N)
    first_key = tl.maximum(first_seen(first_position, WINDOW, CHUNKED), 0) if WINDOW > 0 else 0
    begin = first_key // BLOCK_N
    # tiles full_begin..full_end-1 are seen by every row
    full_end = tl.maximum((first_position + 1 if CAUSAL else seq_len) // BLOCK_N, begin)
    full_begin = begin
    if WINDOW > 0:
        full_begin = tl.maximum(first_seen(first_position + num_rows - 1, WINDOW, CHUNKED) + BLOCK_N - 1, 0) // BLOCK_N
        full_begin = tl.minimum(tl.maximum(full_begin, begin), full_end)
    edge_begin = full_begin if LATENT else full_end

    places = rows[:, None] * (HKV * G * DV) + heads[:, None] * DV + d[None, :]
    if JOIN:
        # that result is one key's value, with the weight of all keys that it comes from
        best = tl.load(lse + rows * lse_token_stride + heads * lse_head_stride, mask=of_row, other=0.0) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.load(out + places, mask=here, other=0.0).to(tl.float32)
    else:
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            best = tl.load(sinks + heads).to(tl.float32) * LOG2E
            total += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW > 0:
        best, total, acc = add_tiles(
            queries, q_rest, keys, table, position, begin, full_begin, first_key, last_key, best, total, acc, scale, softcap,
            block_stride, distance_bias, num_columns, heads, of_row,
            D, DV, LATENT, BS, BLOCK_D, BLOCK_R, BLOCK_N, WINDOW, CHUNKED, CAUSAL, True, SOFTCAP, BIAS, PRECISION,
        )  # fmt: skip
    # one loop over latent rows, with masks: of two the compiler keeps sums in memory
    if not LATENT:
        best, total, acc = add_tiles(
            queries, q_rest, keys, table, position, full_begin, full_end, first_key, last_key, best, total, acc, scale, softcap,
            block_stride, distance_bias, num_columns, heads, of_row,
            D, DV, LATENT, BS, BLOCK_D, BLOCK_R, BLOCK_N, WINDOW, CHUNKED, CAUSAL, False, SOFTCAP, BIAS, PRECISION,
        )  # fmt: skip
    best, total, acc = add_tiles(
        queries, q_rest, keys, table, position, edge_begin, end, first_key, last_key, best, total, acc, scale, softcap,
        block_stride, distance_bias, num_columns, heads, of_row,
        D, DV, LATENT, BS, BLOCK_D, BLOCK_R, BLOCK_N, WINDOW, CHUNKED, CAUSAL, True, SOFTCAP, BIAS, PRECISION,
    )  # fmt: skip
    # rows of no token may have seen no key
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=here)


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    tables: Tensor,
    tiles: Tensor,
    spec: AttentionSpec,
    out: Tensor,
    configs: AttentionConfigs,
    sinks: Tensor | None = None,
    distance_bias: Tensor | None = None,
) -> None:
    """One launch. q `[T, Hq, D]`, rows may be strided; tables `[B, N]` int32; tiles `[n, 5]` int32, of `cut_into_tiles` with
    `head_tile(...).prefill_tokens`; sinks `[Hq]` and distance_bias `[Hq, n]`, contiguous, of a spec that has them -> rows of these
    tiles in out `[T, Hq, Dv]`, contiguous. Dv: `output_dim`."""
    _launch(
        q, kv_cache, layer, tables, tiles, spec, out, configs,
        window=spec.reach or 0, chunked=spec.chunk is not None, causal=spec.causal, lse=None, sinks=sinks,
        distance_bias=distance_bias,
    )  # fmt: skip


def add_context(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    tables: Tensor,
    tiles: Tensor,
    spec: AttentionSpec,
    out: Tensor,
    lse: Tensor,
    configs: AttentionConfigs,
) -> None:
    """One launch that adds keys, all of which each row sees, to a result over other keys.

    As `prefill_attention`, but tiles list the sequences' keys before the chunk as all their tokens; out `[T, Hq, D]`, contiguous,
    has the result over other keys and becomes the one over both; lse `[T, Hq]` float32, strided: the natural logarithm of its
    denominators. No spec with sinks or a distance bias comes here.
    """
    _launch(
        q, kv_cache, layer, tables, tiles, spec, out, configs,
        window=0, chunked=False, causal=False, lse=lse, sinks=None, distance_bias=None,
    )  # fmt: skip


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    tables: Tensor,
    tiles: Tensor,
    spec: AttentionSpec,
    out: Tensor,
    configs: AttentionConfigs,
    *,
    window: int,
    chunked: bool,
    causal: bool,
    lse: Tensor | None,
    sinks: Tensor | None,
    distance_bias: Tensor | None,
) -> None:
    tile = head_tile(spec, kv_cache, configs)
    scale, softcap = softmax_scales(spec)
    attend_tiles[(tiles.shape[0], spec.num_heads // tile.prefill_heads)](
        q, kv_cache, tables, tiles, out, out if lse is None else lse, out if sinks is None else sinks,
        *((out, 0) if distance_bias is None else (distance_bias, distance_bias.shape[1])), layer, scale, softcap,
        q.stride(0), q.stride(1), *layer_strides(kv_cache), tables.stride(0), *((0, 0) if lse is None else lse.stride()),
        HKV=spec.num_kv_heads, G=tile.group, H=tile.prefill_heads, D=spec.head_dim, DV=spec.output_dim,
        LATENT=spec.value_dim is not None, BS=kv_cache.shape[4],
        BLOCK_M=tile.prefill_rows, BLOCK_D=tile.value_dim, BLOCK_R=tile.rest_dim, BLOCK_N=tile.prefill_keys, WINDOW=window,
        CHUNKED=chunked, CAUSAL=causal, SOFTCAP=spec.softcap is not None, JOIN=lse is not None, SINKS=sinks is not None,
        BIAS=distance_bias is not None, PRECISION=tile.precision,
        num_warps=configs.prefill_warps, num_stages=configs.prefill_stages, enable_fp_fusion=True,
        **register_limit(tile.prefill_registers),
    )  # fmt: skip
