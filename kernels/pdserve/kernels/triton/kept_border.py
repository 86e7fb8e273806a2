"""The borders of top_k and top_p: pivots divide a row's logits a few times, then a search among the tokens that are left.

A border is the number (`ordered`) of the last kept token; 0 keeps all. Pivots bring it between two logits, `low` and `high`:
tokens from `high` up are kept, tokens below `low` are not, and those between are listed. Masses at pivots are sums in float32
with a known bound of their error, so the border of top_p among the listed tokens is known but for the few tokens at that bound.
If none of these wins the draw, they do not matter; else masses are computed as integers, whose order of summation does not matter,
and `refined_border` has the row's border. A border among more tokens than the list holds is searched in the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.kernels.triton.sampled_row import (
    float_parameter,
    is_cut,
    is_drawn,
    lowest_logit,
    ordered,
    row_parameter,
    scaled_logits,
    top_of_row,
)

PIVOTS = 16
DIVISIONS = 3
"""Passes that divide the tokens by pivots: among normal logits 2 leave thousands of tokens, and 3 hundreds."""
_PIVOTS = tl.constexpr(PIVOTS)
_STEPS = tl.constexpr(PIVOTS - 2)
"""Intervals between pivots; the last pivot is the lowest logit that may be drawn."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_MASS_OF_HIGHEST = tl.constexpr(2.0**34)
_NO_MASS = tl.constexpr(-25.0)
"""y below which a token has no mass."""
_ROUNDING = tl.constexpr(5e-5)
"""Bound of the error of a difference of masses at pivots, as part of the row's mass."""
_SEARCH_TILE = tl.constexpr(4096)


@triton.jit
def masses(y):
    """`round(exp(y) 2^34)` as int64, halves to even. Adding and taking away 2^23 rounds what has a fraction."""
    mass = tl.exp(y) * 17179869184.0
    return tl.where(mass < 8388608.0, (mass + 8388608.0) - 8388608.0, mass).to(tl.int64)


@triton.jit
def interval(pivots, numbers, sums, carried, parameters, row, N, V, parts, PARTS: tl.constexpr):
    """`low` and `high`; number and mass from `high` up; a mass that the tokens of top_k reach; number and mass of all drawn tokens.

    By what a launch of `weigh_pivots` found, and what it knew from those before: `carried [N, 8]`, the first five numbers. `high`
    is inf where no pivot is surely kept. `low` is not above the border of top_k, whose mass is what top_p is a share of; it is the
    lowest logit that may be drawn where no pivot is surely low enough.
    """
    at, part = tl.arange(0, _PIVOTS), tl.arange(0, PARTS)
    place = (row * parts + part[:, None]) * _PIVOTS + at[None, :]
    mask = (part[:, None] < parts) & (at[None, :] >= 0)
    number = tl.sum(tl.load(numbers + place, mask=mask, other=0), 0)
    mass = tl.sum(tl.load(sums + place, mask=mask, other=0.0), 0)
    pivot = tl.load(pivots + row * _PIVOTS + at)
    known = carried + row * 8
    top_k = row_parameter(parameters, 3, row, N)
    share = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True).to(tl.float32)
    least = tl.maximum(tl.load(known + 4), tl.max(tl.where(number <= top_k, mass, 0.0), 0))
    # share is 1 or more without top_p
    is_kept = (number <= top_k) & (mass <= tl.where(share < 1.0, share * least * (1.0 - _ROUNDING), float("inf")))
    total = tl.max(mass, 0)
    is_enough = tl.where(top_k < V, number >= top_k, mass >= share * total * (1.0 + _ROUNDING))
    low = tl.maximum(tl.max(tl.where(is_enough, pivot, float("-inf")), 0), tl.min(pivot, 0))
    low = tl.maximum(low, tl.load(known))
    high, high_before = tl.min(tl.where(is_kept, pivot, float("inf")), 0), tl.load(known + 1)
    is_nearer = high < high_before
    number_above = tl.where(is_nearer, tl.max(tl.where(is_kept, number, 0), 0).to(tl.float32), tl.load(known + 2))
    mass_above = tl.where(is_nearer, tl.max(tl.where(is_kept, mass, 0.0), 0), tl.load(known + 3))
    high = tl.minimum(high, high_before)
    return low, high, number_above, mass_above, least, tl.max(number, 0), total


@triton.jit(do_not_specialize=["N"])
def weigh_pivots(
    logits, highest, highest_id, lowest, parameters, before, before_numbers, before_sums, before_carried,
    pivots, numbers, sums, carried, N, V, stride, part,
    TILE: tl.constexpr, PARTS: tl.constexpr, TURN: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Per part: number (with top_k) and masses (with top_p) of the tokens that reach each pivot, `[N, S, 16]`.

    The pivots, `[N, 16]`, divide the range of the logits, or the interval of the division before. Every other pass begins at the
    last part, which the L2 cache still has from the pass before.
    """
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    turn = parts - 1 - tl.program_id(1) if TURN % 2 == 0 else tl.program_id(1)
    top, _top_id = top_of_row(highest, highest_id, row, parts, PARTS)
    temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
    if is_drawn(top, temperature) & is_cut(parameters, row, N, V):
        each = tl.arange(0, PARTS)
        least = tl.min(tl.load(lowest + row * parts + each, mask=each < parts, other=float("inf")), 0)
        lowest_drawn = lowest_logit(top, temperature, floor)
        reach = tl.where(row_parameter(parameters, 3, row, N) < V, floor, tl.maximum(floor, _NO_MASS))
        low = tl.maximum(tl.maximum(least, lowest_drawn), top + reach * temperature)
        high = top
        nearer_low, nearer_high = tl.full((), float("-inf"), tl.float32), tl.full((), float("inf"), tl.float32)
        none = tl.full((), 0.0, tl.float32)
        number_above, mass_above, least_mass = none, none, none
        if TURN > 0:
            nearer_low, nearer_high, number_above, mass_above, least_mass, _number, _mass = interval(
                before, before_numbers, before_sums, before_carried, parameters, row, N, V, parts, PARTS
            )
            low, high = tl.maximum(low, nearer_low), tl.minimum(high, nearer_high)
        step = (high - low) / _STEPS
        rate = _LOG2_E / temperature
        found_numbers = (tl.zeros((TILE // 4,), tl.int32),) * _PIVOTS
        found_sums = (tl.zeros((TILE // 4,), tl.float32),) * _PIVOTS
        begin = turn * part
        end = tl.minimum(begin + part, V)
        offsets = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        for first in range(begin, end, TILE):
            at = first + offsets
            values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
            mass = tl.exp2((values - top) * rate)
            more_numbers, more_sums = (), ()
            for i in tl.static_range(_PIVOTS):
                reaches = values >= (lowest_drawn if i == _PIVOTS - 1 else tl.maximum(high - step * i, lowest_drawn))
                if TOP_K:
                    more_numbers = more_numbers + (found_numbers[i] + tl.sum(reaches.to(tl.int32), 1),)  # type: ignore[assignment] # noqa: RUF005
                else:
                    more_numbers = more_numbers + (found_numbers[i],)  # type: ignore[assignment] # noqa: RUF005
                if TOP_P:
                    more_sums = more_sums + (found_sums[i] + tl.sum(tl.where(reaches, mass, 0.0), 1),)  # type: ignore[assignment] # noqa: RUF005
                else:
                    more_sums = more_sums + (found_sums[i],)  # type: ignore[assignment] # noqa: RUF005
            found_numbers, found_sums = more_numbers, more_sums
        place = (row * parts + turn) * _PIVOTS
        for i in tl.static_range(_PIVOTS):
            tl.store(numbers + place + i, tl.sum(found_numbers[i], 0))
            tl.store(sums + place + i, tl.sum(found_sums[i], 0))
        if turn == 0:
            each_pivot = tl.arange(0, _PIVOTS)
            values_of = tl.maximum(high - step * each_pivot.to(tl.float32), lowest_drawn)
            values_of = tl.where(each_pivot == _PIVOTS - 1, lowest_drawn, values_of)
            tl.store(pivots + row * _PIVOTS + each_pivot, values_of)
            tl.store(carried + row * 8, nearer_low)
            tl.store(carried + row * 8 + 1, nearer_high)
            tl.store(carried + row * 8 + 2, number_above)
            tl.store(carried + row * 8 + 3, mass_above)
            tl.store(carried + row * 8 + 4, least_mass)


@triton.jit
def last_number(numbers, weights, above, wanted):
    """The highest number whose tokens, with all above, weigh what is wanted; all listed tokens together do.

    numbers: 0 for places that hold no token. above: weight of the tokens that precede all listed ones.
    """
    beyond = tl.max(numbers, 0) + 1
    high, low = beyond, tl.min(tl.where(numbers > 0, numbers, beyond), 0)
    if above.to(tl.float64) >= wanted:
        low = high
    # logits first, then ids of one logit: most logits are of one token
    while (low >> 32) < (high >> 32):
        middle = (((low >> 32) + (high >> 32) + 1) // 2) << 32
        is_reached = (above + tl.sum(tl.where(numbers >= middle, weights, 0), 0)).to(tl.float64) >= wanted
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle - 1)
    low = tl.minimum(tl.min(tl.where(numbers >= low, numbers, beyond), 0), high)
    high = tl.maximum(tl.max(tl.where(numbers <= high, numbers, 0), 0), low)
    while low < high:
        middle = low + (high - low) // 2 + (high - low) % 2
        is_reached = (above + tl.sum(tl.where(numbers >= middle, weights, 0), 0)).to(tl.float64) >= wanted
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle - 1)
    return low


@triton.jit
def weight_of_row(logits_row, threshold, V, top, temperature, floor, WEIGHS: tl.constexpr):
    """Number, or mass if WEIGHS, of the row's tokens with this number (`ordered`) or a higher one."""
    weight = tl.zeros((_SEARCH_TILE,), tl.int64)
    for first in range(0, V, _SEARCH_TILE):
        at = first + tl.arange(0, _SEARCH_TILE)
        values = tl.load(logits_row + at, mask=at < V, other=float("-inf"))
        y = scaled_logits(values, top, temperature)
        is_in = (y >= floor) & (ordered(values, at) >= threshold)
        weight += tl.where(is_in, masses(tl.where(is_in, y, 0.0)), 0) if WEIGHS else is_in.to(tl.int64)
    return tl.sum(weight, 0)


@triton.jit
def last_number_of_row(logits_row, low, high, V, top, temperature, floor, wanted, WEIGHS: tl.constexpr):
    """`last_number` over the whole row, from `low`, whose tokens, with all above, weigh what is wanted, to `high`."""
    # logits first, then ids of one logit
    while (low >> 32) < (high >> 32):
        middle = (((low >> 32) + (high >> 32) + 1) // 2) << 32
        is_reached = weight_of_row(logits_row, middle, V, top, temperature, floor, WEIGHS).to(tl.float64) >= wanted
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle - 1)
    last_id = ((low >> 32) << 32) + 0xFFFFFFFF - V
    low = tl.minimum(tl.maximum(low, last_id), high)
    while low < high:
        middle = low + (high - low) // 2 + (high - low) % 2
        is_reached = weight_of_row(logits_row, middle, V, top, temperature, floor, WEIGHS).to(tl.float64) >= wanted
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle - 1)
    return low


@triton.jit
def find_border(
    logits_row, listed_row, count, pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V, top, temperature, parts,
    PARTS: tl.constexpr, LIMIT: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """The border of top_k; a number that is the row's border or lower; a number from which on all tokens are surely kept.

    count: number of listed tokens, not above LIMIT.
    """
    low, _high, above, mass_above, _least, number, mass = interval(
        pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V, parts, PARTS
    )
    top_k = row_parameter(parameters, 3, row, N)
    share = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True)
    i = tl.arange(0, LIMIT)
    at = tl.load(listed_row + i, mask=i < count, other=0)
    values = tl.load(logits_row + at, mask=i < count, other=float("-inf"))
    numbers = tl.where(i < count, ordered(values, at), 0)
    # of all tokens with the logit `low` the last
    border = ordered(low, tl.full((), -1, tl.int32))
    if TOP_K:  # noqa: SIM102
        if top_k < number:
            found = last_number(numbers, (numbers > 0).to(tl.int64), above.to(tl.int64), top_k.to(tl.float64))
            border = tl.where(found > border, found, border)
    of_top_k, sure = border, border
    if TOP_P:  # noqa: SIM102
        if share < 1.0:
            weights = masses(tl.where(numbers > 0, scaled_logits(values, top, temperature), 0.0))
            weights = tl.where((numbers > 0) & (numbers >= border), weights, 0)
            # masses at pivots are parts of that of the highest
            before = mass_above.to(tl.float64) * _MASS_OF_HIGHEST
            kept = mass.to(tl.float64) * _MASS_OF_HIGHEST
            slack = kept * _ROUNDING
            kept = tl.where(top_k < number, before + tl.sum(weights, 0).to(tl.float64), kept)
            found = last_number(numbers, weights, before.to(tl.int64), share * kept + slack)
            border = tl.where(found > border, found, border)
            found = last_number(numbers, weights, before.to(tl.int64), share * kept - slack)
            sure = tl.where(found > sure, found, sure)
    return of_top_k, border, sure


@triton.jit
def refined_border(
    logits_row, listed_row, count, lower, sure, wanted, above, top, temperature, LIMIT: tl.constexpr
):  # fmt: skip
    """The row's border, which top_p puts between the numbers `lower` and `sure`. above: mass of the tokens from `sure` on."""
    i = tl.arange(0, LIMIT)
    at = tl.load(listed_row + i, mask=i < count, other=0)
    values = tl.load(logits_row + at, mask=i < count, other=float("-inf"))
    numbers = tl.where(i < count, ordered(values, at), 0)
    numbers = tl.where((numbers >= lower) & (numbers < sure), numbers, 0)
    weights = tl.where(numbers > 0, masses(tl.where(numbers > 0, scaled_logits(values, top, temperature), 0.0)), 0)
    found = last_number(numbers, weights, above, wanted)
    return tl.where(above.to(tl.float64) >= wanted, sure, tl.where(found > lower, found, lower))


@triton.jit
def exact_border(
    logits_row, pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V, top, temperature, floor, parts,
    PARTS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """The border by passes over the whole row."""
    lowest, highest, _number_above, _mass_above, _least, _number, _mass = interval(
        pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V, parts, PARTS
    )
    border = ordered(lowest, tl.full((), -1, tl.int32))
    high = ordered(tl.minimum(highest, top), tl.full((), 0, tl.int32))
    share = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True)
    if TOP_K:
        top_k = row_parameter(parameters, 3, row, N)
        if weight_of_row(logits_row, border, V, top, temperature, floor, False) > top_k:
            # top_p keeps fewer than top_k, so its `high` is none of top_k
            last = tl.where(share < 1.0, ordered(top, tl.full((), 0, tl.int32)), high)
            border = last_number_of_row(
                logits_row, border, last, V, top, temperature, floor, top_k.to(tl.float64), False
            )
    if TOP_P:  # noqa: SIM102
        if share < 1.0:
            of_row = tl.where(row_parameter(parameters, 3, row, N) < V, border, 0)
            wanted = share * weight_of_row(logits_row, of_row, V, top, temperature, floor, True).to(tl.float64)
            border = last_number_of_row(logits_row, border, high, V, top, temperature, floor, wanted, True)
    return border
