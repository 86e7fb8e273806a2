"""The borders of top_k and top_p: bins of equal width in y, then a search among the tokens of one bin.

All sums are of integers, so the order in which programs add does not matter. A border is the number (`ordered`) of the last kept
token; 0 keeps all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.kernels.triton.sampled_row import (
    float_parameter,
    is_drawn,
    ordered,
    row_parameter,
    scaled_logits,
    top_of_row,
)

BINS = 2048
_BINS = tl.constexpr(BINS)
_LOWEST_Y = tl.constexpr(-50.0)
_FAN = tl.constexpr(16)
"""Thresholds that one pass of the search tries."""


@triton.jit
def masses(y):
    """`round(exp(y) 2^34)` as int64, halves to even. Adding and taking away 2^23 rounds what has a fraction."""
    mass = tl.exp(y) * 17179869184.0
    return tl.where(mass < 8388608.0, (mass + 8388608.0) - 8388608.0, mass).to(tl.int64)


@triton.jit
def bin_scale(lowest, row, parts, top, temperature, floor, PARTS: tl.constexpr):
    """Bins per unit of -y: 2,048 bins reach from the highest to the lowest token that may be drawn."""
    part = tl.arange(0, PARTS)
    least = tl.min(tl.load(lowest + row * parts + part, mask=part < parts, other=float("inf")), 0)
    reach = -tl.maximum(scaled_logits(least, top, temperature), floor)
    return tl.where(reach > 0, (_BINS - 1) / tl.maximum(reach, 1e-6), 0.0)


@triton.jit
def bins_of(y, scale):
    """A higher logit is never in a later bin, since each operation is monotone."""
    return tl.minimum((-y * scale).to(tl.int32), _BINS - 1)


@triton.jit
def is_cut(parameters, row, N, V):
    top_p = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True)
    return (row_parameter(parameters, 3, row, N) < V) | (top_p < 1.0)


@triton.jit
def fill_bins(
    logits, highest, highest_id, lowest, parameters, bins, N, V, stride, part, TILE: tl.constexpr, PARTS: tl.constexpr
):
    """`bins[0]`: number of tokens, `bins[1]`: their masses, `[2, N, BINS]`."""
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    top, _top_id = top_of_row(highest, highest_id, row, parts, PARTS)
    temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
    scale = bin_scale(lowest, row, parts, top, temperature, floor, PARTS)
    begin = tl.program_id(1) * part
    end = tl.where(is_drawn(top, temperature) & is_cut(parameters, row, N, V), tl.minimum(begin + part, V), begin)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        y = scaled_logits(tl.load(logits + row * stride + at, mask=at < end, other=float("-inf")), top, temperature)
        is_in = y >= floor
        y = tl.where(is_in, y, 0.0)
        mass = masses(y)
        tl.atomic_add(bins + row * _BINS + bins_of(y, scale), is_in.to(tl.int64), mask=is_in, sem="relaxed")
        tl.atomic_add(bins + (N + row) * _BINS + bins_of(y, scale), mass, mask=is_in & (mass > 0), sem="relaxed")


@triton.jit
def border_bin(bins, kept_mass, parameters, row, N, V, TOP_P: tl.constexpr, AFTER_TOP_K: tl.constexpr):
    """The bin that contains the border, 2,048 if all tokens are kept; the weight of the bins before it; the weight wanted."""
    at = tl.arange(0, _BINS)
    if TOP_P:
        weights = tl.load(bins + (N + row) * _BINS + at)
        share = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True)
        total = tl.load(kept_mass + row) if AFTER_TOP_K else tl.sum(weights, 0)
        wanted = tl.where(share < 1.0, share * total.to(tl.float64), float("inf"))
    else:
        weights = tl.load(bins + row * _BINS + at)
        top_k = row_parameter(parameters, 3, row, N)
        wanted = tl.where(top_k < V, top_k.to(tl.float64), float("inf"))
    found = tl.min(tl.where(tl.cumsum(weights, 0).to(tl.float64) >= wanted, at, _BINS), 0)
    return found, tl.sum(tl.where(at < found, weights, 0), 0), wanted


@triton.jit
def list_bin(
    logits, highest, highest_id, lowest, parameters, bins, kept_mass, borders, listed, counts, N, V, stride, part,
    TILE: tl.constexpr, LIMIT: tl.constexpr, TOP_P: tl.constexpr, AFTER_TOP_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`listed[n]`: ids of the first LIMIT tokens in the border's bin, in any order; `counts[n]`: their number without the limit."""
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    top, _top_id = top_of_row(highest, highest_id, row, parts, PARTS)
    temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
    scale = bin_scale(lowest, row, parts, top, temperature, floor, PARTS)
    found, _, _ = border_bin(bins, kept_mass, parameters, row, N, V, TOP_P, AFTER_TOP_K)
    border = tl.load(borders + row).to(tl.uint64, bitcast=True)
    begin = tl.program_id(1) * part
    end = tl.where((found < _BINS) & is_drawn(top, temperature), tl.minimum(begin + part, V), begin)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
        y = scaled_logits(values, top, temperature)
        is_in = (y >= floor) & (ordered(values, at) >= border)
        is_in = is_in & (bins_of(tl.where(is_in, y, 0.0), scale) == found)
        number = tl.sum(is_in.to(tl.int32), 0)
        if number > 0:
            base = tl.atomic_add(counts + row, number.to(tl.int64), sem="relaxed")
            place = base + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(listed + row * LIMIT + place, at, mask=is_in & (place < LIMIT))


@triton.jit
def members(
    logits_row, listed_row, first, num_listed, V, top, temperature, floor, scale, found, border, TILE: tl.constexpr
):
    """Numbers (`ordered`) and y of TILE tokens of the bin; number 0 for places that hold none.

    num_listed: length of the list, or -1 if it is not complete: then place i holds token i.
    """
    i = first + tl.arange(0, TILE)
    at = tl.load(listed_row + i, mask=i < num_listed, other=0)
    at = tl.where(num_listed < 0, i, at)
    values = tl.load(logits_row + at, mask=i < tl.where(num_listed < 0, V, num_listed), other=float("-inf"))
    y = scaled_logits(values, top, temperature)
    numbers = ordered(values, at)
    is_in = (y >= floor) & (numbers >= border)
    y = tl.where(is_in, y, 0.0)
    is_in = is_in & (bins_of(y, scale) == found)
    return tl.where(is_in, numbers, 0), y


@triton.jit
def find_border(
    logits, highest, highest_id, lowest, parameters, bins, kept_mass, borders, listed, counts, N, V, stride, parts,
    TILE: tl.constexpr, LIMIT: tl.constexpr, TOP_P: tl.constexpr, AFTER_TOP_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`borders[n]`: the highest number whose tokens, with all above, weigh what is wanted; without top_p also `kept_mass[n]`.

    Each pass over the bin tries 16 thresholds between the lowest and the highest number that are still possible.
    """
    row = tl.program_id(0).to(tl.int64)
    top, _top_id = top_of_row(highest, highest_id, row, parts, PARTS)
    temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
    scale = bin_scale(lowest, row, parts, top, temperature, floor, PARTS)
    found, above, wanted = border_bin(bins, kept_mass, parameters, row, N, V, TOP_P, AFTER_TOP_K)
    before = tl.load(borders + row).to(tl.uint64, bitcast=True)
    border = before
    count = tl.load(counts + row)
    num_listed = tl.where(count <= LIMIT, count, -1).to(tl.int32)
    num_places = tl.where((found < _BINS) & (count > 0), tl.where(num_listed < 0, V, num_listed), 0)
    logits_row, listed_row = logits + row * stride, listed + row * LIMIT
    low = tl.full((), 0xFFFFFFFFFFFFFFFF, tl.uint64)
    high = tl.full((), 0, tl.uint64)
    for first in range(0, num_places, TILE):
        numbers, _y = members(
            logits_row, listed_row, first, num_listed, V, top, temperature, floor, scale, found, before, TILE
        )
        least, most = tl.min(tl.where(numbers > 0, numbers, 0xFFFFFFFFFFFFFFFF), 0), tl.max(numbers, 0)
        low, high = tl.where(least < low, least, low), tl.where(most > high, most, high)
    if low <= high:
        while low < high:
            step = (high - low) // _FAN + 1
            thresholds = low + step * (tl.arange(0, _FAN) + 1).to(tl.uint64)
            sums = tl.zeros((_FAN,), tl.int64)
            for first in range(0, num_places, TILE):
                numbers, y = members(
                    logits_row, listed_row, first, num_listed, V, top, temperature, floor, scale, found, before, TILE
                )
                weights = masses(y) if TOP_P else tl.full((TILE,), 1, tl.int64)
                sums += tl.sum(tl.where(numbers[:, None] >= thresholds[None, :], weights[:, None], 0), 0)
            reaches = ((above + sums).to(tl.float64) >= wanted) & (thresholds <= high)
            low += step * tl.sum(reaches.to(tl.int32), 0).to(tl.uint64)
            high = tl.where(low + step - 1 < high, low + step - 1, high)
        border = low
        tl.store(borders + row, border.to(tl.int64, bitcast=True))
    if not TOP_P:
        at = tl.arange(0, _BINS)
        of_row = tl.load(bins + (N + row) * _BINS + at)
        mass = tl.sum(tl.where(at < found, of_row, 0), 0)
        for first in range(0, num_places, TILE):
            numbers, y = members(
                logits_row, listed_row, first, num_listed, V, top, temperature, floor, scale, found, before, TILE
            )
            mass += tl.sum(tl.where((numbers > 0) & (numbers >= border), masses(y), 0), 0)
        tl.store(kept_mass + row, mass)
