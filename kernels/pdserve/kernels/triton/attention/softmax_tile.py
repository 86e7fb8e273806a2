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
def load_queries(rows, of_row, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Queries of a tile in two parts, `[rows, BLOCK_D]` and `[rows, BLOCK_R]`: see `load_tile`. 0 where `of_row` is False.

    rows: `[rows, 1]` pointers to the first number of each query.
    """
    d = tl.arange(0, BLOCK_D)
    q = tl.load(rows + d[None, :], mask=of_row[:, None] & (d < DV)[None, :], other=0.0)
    q_rest = q
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        q_rest = tl.load(rows + DV + r[None, :], mask=of_row[:, None] & (r < D - DV)[None, :], other=0.0)
    return q, q_rest


@triton.jit
def load_numbers(rows, seen, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """The first NUMBERS numbers of each row, `[BLOCK_N, BLOCK]`, with 0 after them, and with MASKED also where `seen` is False."""
    d = tl.arange(0, BLOCK)
    if MASKED:
        numbers = tl.load(rows + d[None, :], mask=seen[:, None] & (d < NUMBERS)[None, :], other=0.0)
    elif NUMBERS == BLOCK:
        numbers = tl.load(rows + d[None, :])
    else:
        numbers = tl.load(rows + d[None, :], mask=(d < NUMBERS)[None, :], other=0.0)
    return numbers


@triton.jit
def load_tile(
    keys, tables, at, first, end, block_stride,
    D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values at positions `at` of a sequence, from its pages: the first DV numbers of each key `[BLOCK_N, BLOCK_D]`, the
    other `D - DV` of it `[BLOCK_N, BLOCK_R]`, and values `[BLOCK_N, BLOCK_D]`.

    keys: the first key of block 0 in this layer and head. Its values follow all its keys, and have as many numbers; with LATENT the
    values are the keys' first DV numbers, which are read once. Without other numbers BLOCK_R is 0, and the second result has no
    meaning. tables: the sequence's block numbers. With MASKED only positions `first..end-1` are read, and the rest is 0: bytes
    there may be NaN, and the table may end before. Block numbers are multiplied in 64 bits, since a pool may have more than 2^31
    numbers.
    """
    seen = (at >= first) & (at < end)
    block = tl.load(tables + at // BS, mask=seen, other=0) if MASKED else tl.load(tables + at // BS)
    rows = keys + (block.to(tl.int64) * block_stride + (at % BS) * D)[:, None]
    k = load_numbers(rows, seen, DV, BLOCK_D, MASKED)
    rest = k
    if BLOCK_R > 0:
        rest = load_numbers(rows + DV, seen, D - DV, BLOCK_R, MASKED)
    v = k
    if not LATENT:
        v = load_numbers(rows + BS * D, seen, DV, BLOCK_D, MASKED)
    return k, rest, v


@triton.jit
def add_tile(
    q, q_rest, k, rest, v, seen, bias, best, total, acc, scale, softcap,
    BLOCK_R: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`(best, total, acc)` with this tile: the highest score of each row, `sum 2^(score - best)`, and that sum weighted by values.

    q and q_rest are of `load_queries`, k, rest and v of `load_tile`.
    Scores have base 2: `scale` is the spec's times log2(e). With SOFTCAP c a score is `c tanh(s / c)` with
    `tanh(x) = 1 - 2 / (e^2x + 1)`: `scale` is then the spec's times 2 log2(e) / c, and `softcap` is `c log2(e)`. With MASKED a row
    has no score where `seen` is False, and may have none at all. With BIAS `bias` of `load_bias` is added to the scores.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_R > 0:
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
    scores *= scale
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
