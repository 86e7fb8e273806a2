"""Device functions that the sampling kernels share: a row's parameters (`kernels/sampled_rows.py`), its highest logit, scaled
logits, the order of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.kernels.sampled_rows import LOWEST_Y

_LOWEST_Y = tl.constexpr(LOWEST_Y)


@triton.jit
def row_parameter(parameters, which, row, N):
    """int64"""
    return tl.load(parameters + which * N + row)


@triton.jit
def float_parameter(parameters, which, row, N):
    return row_parameter(parameters, which, row, N).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def top_of_row(values, ids, row, parts, PARTS: tl.constexpr):
    """The highest value of the row's parts, and the lowest id that has it. values, ids: `[N, parts]`, the best of each part."""
    part = tl.arange(0, PARTS)
    mask = part < parts
    held = tl.load(values + row * parts + part, mask=mask, other=float("-inf"))
    top = tl.max(held, 0)
    # parts are in the order of ids
    first = tl.min(tl.where((held == top) & mask, part, PARTS - 1), 0)
    return top, tl.load(ids + row * parts + tl.minimum(first, parts - 1))


@triton.jit
def is_drawn(top, temperature):
    """True for rows sampled at random. A row whose highest logit is infinite has no distribution and gets its most likely token."""
    return (temperature > 0) & (tl.abs(top) < float("inf"))


@triton.jit
def is_cut(parameters, row, N, V):
    """True for rows with top_k or top_p."""
    top_p = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True)
    return (row_parameter(parameters, 3, row, N) < V) | (top_p < 1.0)


@triton.jit
def is_limited(parameters, row, N, V):
    """True for rows with top_k, top_p or min_p: what they keep depends on the row's highest logit."""
    return is_cut(parameters, row, N, V) | (float_parameter(parameters, 5, row, N) > _LOWEST_Y)


@triton.jit
def scaled_logits(values, top, temperature):
    """y, with a division that is rounded as on the CPU, unlike `/`."""
    return tl.div_rn(values - top, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def ordered(values, ids):
    """uint64 keys that order tokens: a higher logit has a higher key; of equal logits, the lower id has it; -0 equals 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return (key.to(tl.uint64) << 32) | (0xFFFFFFFF - ids.to(tl.uint32)).to(tl.uint64)


@triton.jit
def lowest_logit(top, temperature, floor):
    """The lowest logit whose y (`scaled_logits`) is at least `floor`; approximate where `floor` is the lowest y that is drawn."""
    found = top + floor * temperature
    if floor > _LOWEST_Y:
        # y rises with the logit
        low, high = tl.full((), -0x7F800000, tl.int64), tl.full((), 0x7F800000, tl.int64)
        while low < high:
            middle = (low + high + 0x100000000) // 2 - 0x80000000
            reaches = scaled_logits(_of_key(middle), top, temperature) >= floor
            low, high = tl.where(reaches, low, middle + 1), tl.where(reaches, middle, high)
        found = _of_key(low)
    return found


@triton.jit
def _of_key(key):
    """The float32 at this position in the order of all float32 numbers; negative keys are negative numbers."""
    bits = tl.abs(key).to(tl.int32)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(key < 0, -value, value)
