"""One tile of keys and values, added to a softmax that is computed tile by tile. Part of decode and prefill attention."""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def load_bias(distance_bias, num_columns, heads, is_head, distances):
    """`[rows, keys]` float32, of base 2: what the distance bias adds to scores; 0 where `is_head` is False.

    distance_bias: `[Hq, num_columns]`. heads and is_head: `[rows]`. distances: `[rows or 1, keys]`, from the key to the query, or
    below 0 where the query does not see the key.
    """
    columns = tl.minimum(tl.maximum(distances, 0), num_columns - 1)
    bias = tl.load(distance_bias + heads[:, None] * num_columns + columns, mask=is_head[:, None], other=0.0)
    return bias.to(tl.float32) * LOG2E


@triton.jit
def load_tile(
    keys, tables, at, first, end,
    block_stride, D: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values `[BLOCK_N, BLOCK_D]` at positions `at` of a sequence, from its pages.

    keys: the first key of block 0 in this layer and head; its values follow all its keys. tables: the sequence's block numbers.
    With MASKED only positions `first..end-1` are read, and the rest is 0: bytes there may be NaN, and the table may end before.
    Block numbers are multiplied in 64 bits, since a pool may have more than 2^31 numbers.
    """
    d = tl.arange(0, BLOCK_D)
    if MASKED:
        seen = (at >= first) & (at < end)
        block = tl.load(tables + at // BS, mask=seen, other=0)
    else:
        block = tl.load(tables + at // BS)
    rows = keys + (block.to(tl.int64) * block_stride + (at % BS) * D)[:, None] + d[None, :]
    if MASKED:
        mask = seen[:, None] & (d < D)[None, :]
        k = tl.load(rows, mask=mask, other=0.0)
        v = tl.load(rows + BS * D, mask=mask, other=0.0)
    elif D == BLOCK_D:
        k = tl.load(rows)
        v = tl.load(rows + BS * D)
    else:
        mask = (d < D)[None, :]
        k = tl.load(rows, mask=mask, other=0.0)
        v = tl.load(rows + BS * D, mask=mask, other=0.0)
    return k, v


@triton.jit
def add_tile(
    q, k, v, seen, bias, best, total, acc,
    scale, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`(best, total, acc)` with this tile: the highest score of each row, `sum 2^(score - best)`, and that sum weighted by values.

    Scores have base 2: `scale` is the spec's times log2(e). With SOFTCAP c a score is `c tanh(s / c)` with
    `tanh(x) = 1 - 2 / (e^2x + 1)`: `scale` is then the spec's times 2 log2(e) / c, and `softcap` is `c log2(e)`. With MASKED a row
    has no score where `seen` is False, and may have none at all. With BIAS `bias` of `load_bias` is added to the scores.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if BIAS:
        scores += bias
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # a row without any score has the highest -inf, and -inf - -inf is NaN
        base = tl.where(higher > float("-inf"), higher, 0.0)
    else:
        higher = tl.maximum(best, tl.max(scores, 1))
        base = higher
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(best - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return higher, total, acc
