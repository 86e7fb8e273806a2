"""Attention of one query token per sequence over its pages, for captured graphs: nothing in a launch depends on a length."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs
from pdserve.kernels.triton.attention.attention_launch import head_tile, layer_strides, softmax_scales
from pdserve.kernels.triton.attention.decode_pieces import MAX_PIECES
from pdserve.kernels.triton.attention.softmax_tile import LOG2E, add_tile, load_bias, load_queries, load_tile
from pdserve.kernels.triton.launch_configs import register_limit

JOINED_NUMBERS = 2048
"""Numbers of pieces that `join_pieces` adds at a time."""


# a specialised layer number would be compiled once for 0, once for 1 and once for multiples of 16
@triton.jit(do_not_specialize=["layer"])
def attend_pieces(
    q, pages, tables, pieces, count, part, lse, distance_bias, num_columns, seq_lens, layer, scale, softcap,
    q_token_stride, q_head_stride, block_stride, head_stride, layer_stride, table_stride,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, BS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`softmax(cap(scale q k^T) + bias) v` over the keys of each piece, and the log2 of its denominator.

    Programs take (piece, KV head, tile of heads) in turn; the rows of a tile are BLOCK_G of the G query heads of a KV head. pieces
    `[n, 4]` and count `[1]` are of `cut_into_pieces` -> part `[n, Hq, DV]`, lse `[n, Hq]`, float32, by place. DV and LATENT: see
    `load_tile`. With BIAS distance_bias is `[Hq, num_columns]`, and seq_lens `[B]` the rows' lengths. Reference: `attend_decode`.
    """
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    # tiles of the same keys are next to each other, so that they find them in the L2 cache
    TILES: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    for item in range(tl.program_id(0), tl.load(count) * (HKV * TILES), tl.num_programs(0)):
        piece = pieces + item // (HKV * TILES) * 4
        head = item // TILES % HKV
        of_group = item % TILES * BLOCK_G + g
        is_head = of_group < G
        here = is_head[:, None] & (d < DV)[None, :]
        row = tl.load(piece)
        first = tl.load(piece + 1)
        end = tl.load(piece + 2)
        place = tl.load(piece + 3)
        heads = head * G + of_group
        q_rows = q + row.to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride
        queries, q_rest = load_queries(q_rows, is_head, D, DV, BLOCK_D, BLOCK_R)
        keys = pages + layer.to(tl.int64) * layer_stride + head * head_stride
        table = tables + row.to(tl.int64) * table_stride
        best = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        for start in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            at = start + n
            k, rest, v = load_tile(keys, table, at, first, end, block_stride, D, DV, LATENT, BS, BLOCK_D, BLOCK_R, True)
            seen = ((at >= first) & (at < end))[None, :]
            bias = 0.0
            if BIAS:
                distances = tl.load(seq_lens + row) - 1 - at
                bias = load_bias(distance_bias, num_columns, heads, is_head, distances[None, :])
            best, total, acc = add_tile(
                queries, q_rest, k, rest, v, seen, bias, best, total, acc, scale, softcap, BLOCK_R, True, SOFTCAP, BIAS, PRECISION
            )  # fmt: skip
        at_head = place.to(tl.int64) * (HKV * G) + heads
        tl.store(lse + at_head, best + tl.log2(total), mask=is_head)
        tl.store(part + at_head[:, None] * DV + d[None, :], acc / total[:, None], mask=here)


@triton.jit
def join_pieces(
    part, lse, first_piece, sinks, out,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MAX_S: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """`out[r] = sum_s 2^(lse_s - m) part_s / sum_s 2^(lse_s - m)` over the pieces s of row r, for one head; m is the highest lse.

    With SINKS the head's sink is one more term of the denominator. first_piece `[B + 1]`, sinks `[Hq]` -> out `[B, Hq, D]`; 0 in a
    row without pieces.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_piece + row)
    count = tl.load(first_piece + row + 1) - first
    s = tl.arange(0, MAX_S)
    logs = tl.load(lse + (first + s).to(tl.int64) * HQ + head, mask=s < count, other=float("-inf"))
    highest = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest > float("-inf"), highest, 0.0)
    total = tl.sum(tl.exp2(logs - highest), 0)
    if SINKS:
        total += tl.exp2(sink - highest)
    # few rows have many pieces: a tile for all of them would mostly be empty
    d = tl.arange(0, BLOCK_D)
    values = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, count, BLOCK_S):
        some = begin + tl.arange(0, BLOCK_S)
        at = (first + some).to(tl.int64) * HQ + head
        weights = tl.exp2(tl.load(lse + at, mask=some < count, other=float("-inf")) - highest)
        parts = tl.load(part + at[:, None] * D + d[None, :], mask=(some < count)[:, None] & (d < D)[None, :], other=0.0)
        values += tl.sum(parts * weights[:, None], 0)
    result = values / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (row.to(tl.int64) * HQ + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    tables: Tensor,
    pieces: Tensor,
    count: Tensor,
    first_piece: Tensor,
    part: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    out: Tensor,
    configs: AttentionConfigs,
    sinks: Tensor | None = None,
    distance_bias: Tensor | None = None,
    seq_lens: Tensor | None = None,
) -> None:
    """Two launches that depend only on B.

    q `[B, Hq, D]`, rows may be strided; tables `[B, N]` int32; pieces `[>= n, 4]`, count `[1]` and first_piece `[B + 1]` int32, of
    `cut_into_pieces`; part `[>= n * Hq * Dv]` and lse `[>= n * Hq]` float32, overwritten; sinks `[Hq]`, contiguous, of a spec that
    has them; distance_bias `[Hq, columns]`, contiguous, of a spec that has it, with seq_lens `[B]` int32 -> out `[B, Hq, Dv]`,
    contiguous. Dv: `output_dim`.
    """
    num_rows, num_heads, head_dim = q.shape
    tile = head_tile(spec, kv_cache, configs)
    scale, softcap = softmax_scales(spec)
    attend_pieces[(configs.decode_programs,)](
        q, kv_cache, tables, pieces, count, part, lse,
        lse if distance_bias is None else distance_bias, 0 if distance_bias is None else distance_bias.shape[1],
        count if seq_lens is None else seq_lens, layer, scale, softcap,
        q.stride(0), q.stride(1), *layer_strides(kv_cache), tables.stride(0),
        HKV=spec.num_kv_heads, G=tile.group, D=head_dim, DV=spec.output_dim, LATENT=spec.value_dim is not None,
        BS=kv_cache.shape[4], BLOCK_G=tile.decode_rows, BLOCK_D=tile.value_dim, BLOCK_R=tile.rest_dim, BLOCK_N=tile.decode_keys,
        SOFTCAP=spec.softcap is not None, BIAS=distance_bias is not None, PRECISION=tile.precision,
        num_warps=tile.decode_warps, num_stages=configs.decode_stages, enable_fp_fusion=True,
        **register_limit(configs.max_registers),
    )  # fmt: skip
    join_pieces[(num_rows, num_heads)](
        part, lse, first_piece, lse if sinks is None else sinks, out,
        HQ=num_heads, D=spec.output_dim, BLOCK_D=tile.value_dim, MAX_S=MAX_PIECES,
        BLOCK_S=min(MAX_PIECES, JOINED_NUMBERS // tile.value_dim), SINKS=sinks is not None,
        num_warps=configs.join_warps, enable_fp_fusion=True,
    )  # fmt: skip
