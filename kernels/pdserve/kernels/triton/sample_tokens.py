"""Greedy and random sampling on a device, by the rules of `engine/sampling/kept_tokens.py` and `token_draw.py`. Nothing is sorted.

Programs divide each row into parts, and no program waits for another. N rows, S parts; all launches but `choose` and `choose_again`
are passes over the logits of the rows that need them:

    scan_rows       highest logit, and its lowest id, of each part; lists tokens that may win    grid (N, S)   all rows
    weigh_pivots    number and mass of the tokens above each of 15 pivots; three launches        grid (N, S)   top_k, top_p
    list_kept       lists kept tokens that may win, and the tokens between two pivots            grid (N, S)   top_k, top_p, min_p
    choose          the border between the pivots, the noise of what is listed, the token        grid (N,)     all rows
    weigh_exactly   masses as integers, of rows whose token is that near to the border           grid (N, S)   top_p
    choose_again    the token of these rows                                                      grid (N,)     top_p

A token may win if its lead, the first byte of its noise, is 0, which one in 256 is, or if its y is so high that its lead does not
exclude it (`list_hits`): the noise of all others is not computed. So a random row without limits is one pass.

Equality with the CPU: noise, order, ties and y are the same bits. Two results are rounded elsewhere: `exp` of a mass (some
units in the last place of float32: the border of top_p may lie one token further), and the noise, which is computed in float64 with
another logarithm (one unit in the last place of float32 in fewer than 1 in 10^6 numbers).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.sampled_rows import PARAMETERS, PackedRows
from pdserve.kernels.triton.kept_border import (
    DIVISIONS,
    PIVOTS,
    exact_border,
    find_border,
    interval,
    masses,
    refined_border,
    weigh_pivots,
)
from pdserve.kernels.triton.launch_configs import LaunchConfigs, register_limit
from pdserve.kernels.triton.noise import exact_gumbel, lead_words, noise_bits, rough_gumbel
from pdserve.kernels.triton.sampled_row import (
    float_parameter,
    is_cut,
    is_drawn,
    is_limited,
    lowest_logit,
    ordered,
    row_parameter,
    scaled_logits,
    top_of_row,
)

_SLACK = tl.constexpr(1e-3)
"""Sums of rough noise this near to the highest are computed exactly."""
_LEAD_SLACK = tl.constexpr(0.006)
"""0.004 log2(e): the noise of a lead of 0 and the bound of other leads are 0.002 apart, and sums of y and noise are rounded."""
_LEAST_OF_LEAD = tl.constexpr(5.5433)
"""ln(255.5), rounded up: the least noise of a lead of 0."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3e38)


@triton.jit
def list_hits(
    values, is_candidate, is_kept, bound, is_first, rate, first, seed, index, position, count, hits_row,
    LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lists the candidates of a tile that may win; returns `bound`: some kept token is as good as one with this logit and lead 0.

    values `[TILE / 4, 4]`, first: id of the first. Noise is at most `-ln(lead / 256)`, so a token loses against such a one if its
    lead exceeds `exp(difference of y)`. Tokens with lead 0 raise the bound in every tile; of the first tile, whose hits would be
    many where the bound is low, any token does. rate: log2(e) / temperature. An entry is the number of a quad of tokens, and 4
    bits that name tokens of it; `count` counts entries beyond LIMIT too.
    """
    places_in_word = tl.arange(0, 4)[None, :]
    words = lead_words(first, seed, index, position, TILE // 4)
    leads = ((words[:, None] >> (places_in_word * 8).to(tl.uint32)) & 0xFF).to(tl.int32)
    best = tl.max(tl.where(is_kept & (leads == 0), values, _LOWEST), 1)
    bound = tl.maximum(bound, tl.max(best, 0))
    if is_first | (bound == _LOWEST):
        # noise is at least ln((255 - lead) / (lead + 1)); log2(255.5) is rounded up, too
        least = tl.log2(tl.maximum(255 - leads, 0.5) / (leads + 1).to(tl.float32)) - 7.998
        bound = tl.maximum(bound, tl.max(tl.max(tl.where(is_kept, values + least / rate, _LOWEST), 1), 0))
    # as much lower as the noise of a lead of 0 and the bound of other leads are apart, and as sums are rounded
    compared = bound - (_LEAD_SLACK / rate + tl.abs(bound) * 1.2e-7)
    is_hit = is_candidate & (leads.to(tl.float32) <= tl.exp2((values - compared) * rate))
    names = tl.sum(is_hit.to(tl.int32) << places_in_word, 1)
    quads = first // 4 + tl.arange(0, TILE // 4)
    # few are hit: an addition of each costs less than a sum of the tile
    place = tl.atomic_add(count + quads * 0, 1, mask=names > 0, sem="relaxed")
    tl.store(hits_row + place, (quads << 4) | names, mask=(names > 0) & (place < LIMIT))
    return bound


@triton.jit(do_not_specialize=["N"])
def scan_rows(
    logits, parameters, highest, highest_id, lowest, counts, hits, N, V, stride, part,
    TILE: tl.constexpr, HITS: tl.constexpr, RANDOM: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Per part: its highest logit, the lowest id that has it, and (CUT) its lowest finite logit; hits of rows without limits."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, V)
    offsets = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    best = tl.full((TILE // 4,), float("-inf"), tl.float32)
    best_at = begin + tl.arange(0, TILE // 4) * 4
    least = tl.full((TILE // 4,), float("inf"), tl.float32)
    if RANDOM:
        temperature = float_parameter(parameters, 4, row, N)
        is_listed = tl.where(is_limited(parameters, row, N, V), 0.0, temperature) > 0
        rate = _LOG2_E / tl.where(temperature > 0, temperature, 1.0)
        seed, index = row_parameter(parameters, 0, row, N), row_parameter(parameters, 1, row, N)
        position = row_parameter(parameters, 2, row, N)
        bound = tl.full((), _LOWEST, tl.float32)
    for first in range(begin, end, TILE):
        at = first + offsets
        values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
        of_quads = tl.max(values, 1)
        is_higher = of_quads > best
        best = tl.where(is_higher, of_quads, best)
        best_at = tl.where(is_higher, first + tl.arange(0, TILE // 4) * 4, best_at)
        if CUT:
            least = tl.minimum(least, tl.min(tl.where(values > float("-inf"), values, float("inf")), 1))
        if RANDOM:  # noqa: SIM102
            if is_listed:
                is_possible = values > float("-inf")
                bound = list_hits(
                    values, is_possible, is_possible, bound, first == begin, rate, first, seed, index, position,
                    counts + row, hits + row * HITS, HITS, TILE,
                )  # fmt: skip
    top = tl.max(best, 0)
    tl.store(highest + place, top)
    # the first quad that has it, and there the first token
    at = tl.min(tl.where(best == top, best_at, V - 1), 0) + tl.arange(0, 4)
    values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
    tl.store(highest_id + place, tl.minimum(tl.min(tl.where(values == top, at, V), 0), V - 1))
    if CUT:
        tl.store(lowest + place, tl.min(least, 0))


@triton.jit(do_not_specialize=["N"])
def list_kept(
    logits, parameters, highest, highest_id, pivots, pivot_numbers, pivot_sums, carried, counts, hits, listed, N, V, stride, part,
    TILE: tl.constexpr, PARTS: tl.constexpr, HITS: tl.constexpr, LIMIT: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Lists the hits of rows with limits, and (CUT) the tokens between `low` and `high`.

    Begins at the last part, as `weigh_pivots` does.
    """
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    turn = parts - 1 - tl.program_id(1)
    top, top_id = top_of_row(highest, highest_id, row, parts, PARTS)
    temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
    if is_drawn(top, temperature) & is_limited(parameters, row, N, V):
        low = lowest_logit(top, temperature, floor)
        high = low
        if CUT:  # noqa: SIM102
            if is_cut(parameters, row, N, V):
                low, high, _number_above, _mass_above, _least, _number, _mass = interval(
                    pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V, parts, PARTS
                )
        seed, index = row_parameter(parameters, 0, row, N), row_parameter(parameters, 1, row, N)
        position = row_parameter(parameters, 2, row, N)
        rate = _LOG2_E / temperature
        # the most likely token is kept
        noise = rough_gumbel(noise_bits(tl.full((1,), 0, tl.int32) + top_id, seed, index, position))
        bound = top + (tl.max(noise, 0) - _SLACK - _LEAST_OF_LEAD) * temperature
        begin = turn * part
        end = tl.minimum(begin + part, V)
        offsets = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
        for first in range(begin, end, TILE):
            at = first + offsets
            values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
            is_kept, is_candidate = values >= high, values >= low
            bound = list_hits(
                values, is_candidate, is_kept, bound, first == begin, rate, first, seed, index, position,
                counts + row, hits + row * HITS, HITS, TILE,
            )  # fmt: skip
            if CUT:
                is_between = (values < high) & (values >= low)
                of_quads = tl.sum(is_between.to(tl.int32), 1)
                number = tl.sum(of_quads, 0)
                if number > 0:
                    base = tl.atomic_add(counts + N + row, number, sem="relaxed")
                    before = base + tl.cumsum(of_quads, 0) - of_quads - 1
                    place = before[:, None] + tl.cumsum(is_between.to(tl.int32), 1)
                    tl.store(listed + row * LIMIT + place, at, mask=is_between & (place < LIMIT))


@triton.jit
def draw(
    logits_row,
    hits_row,
    num_hits,
    is_listed,
    border,
    top,
    temperature,
    floor,
    seed,
    index,
    position,
    V,
    TILE: tl.constexpr,
):
    """The token with the highest sum of y and noise, of equal ones the lowest: among the hits, or (not is_listed) in the whole row.

    Rough noise finds the few tokens that can win, whose noise is then computed exactly, one after the other.
    """
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.full((), 0, tl.int32)
    num_entries = tl.where(is_listed, num_hits, (V + 3) // 4)
    for first in range(0, num_entries, TILE):
        i = first + tl.arange(0, TILE)
        entries = tl.load(hits_row + i, mask=is_listed & (i < num_entries), other=0)
        quads = tl.where(is_listed, entries >> 4, i)
        names = tl.where(i < num_entries, tl.where(is_listed, entries & 15, 15), 0)
        while tl.max(names, 0) > 0:
            place_in_word = tl.where(
                (names & 3) != 0, ((names & 1) == 0).to(tl.int32), tl.where((names & 4) != 0, 2, 3)
            )
            at = quads * 4 + place_in_word
            is_token = (names > 0) & (at < V)
            names = names & (names - 1)
            values = tl.load(logits_row + at, mask=is_token, other=float("-inf"))
            y = scaled_logits(values, top, temperature)
            is_kept = is_token & (y >= floor) & (ordered(values, at) >= border)
            if tl.max(is_kept.to(tl.int32), 0) > 0:
                bits = noise_bits(at, seed, index, position)
                rough = tl.where(is_kept, y + rough_gumbel(bits), float("-inf"))
                bound = tl.maximum(tl.max(rough, 0), best) - _SLACK
                token = tl.min(tl.where(rough >= bound, at, V), 0)
                while token < V:
                    is_it = is_kept & (at == token)
                    its_y = tl.max(tl.where(is_it, y, float("-inf")), 0)
                    total = its_y + exact_gumbel(tl.max(tl.where(is_it, bits, 0), 0))
                    is_better = (total > best) | ((total == best) & (token < best_id))
                    best, best_id = tl.where(is_better, total, best), tl.where(is_better, token, best_id)
                    token = tl.min(tl.where((rough >= bound) & (at > token), at, V), 0)
    return best_id


@triton.jit(do_not_specialize=["N", "parts"])
def choose(
    logits, parameters, highest, highest_id, pivots, pivot_numbers, pivot_sums, carried, counts, hits, listed,
    undecided, chosen, N, V, stride, parts,
    TILE: tl.constexpr, PARTS: tl.constexpr, HITS: tl.constexpr, LIMIT: tl.constexpr, RANDOM: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """`chosen[0, n]`: the row's token; `chosen[1, n]`: the bits of its highest logit.

    `undecided[n]`: whether the token may lie beyond the border of top_p; the borders of `find_border`.
    """
    row = tl.program_id(0).to(tl.int64)
    top, token = top_of_row(highest, highest_id, row, parts, PARTS)
    is_unsure = tl.full((), False, tl.int1)
    if RANDOM:
        temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
        if is_drawn(top, temperature):
            logits_row, listed_row = logits + row * stride, listed + row * LIMIT
            num_hits = tl.load(counts + row)
            is_listed = num_hits <= HITS
            border, sure = tl.full((), 0, tl.uint64), tl.full((), 0, tl.uint64)
            of_top_k = border
            if TOP_K or TOP_P:
                count = tl.load(counts + N + row)
                if is_cut(parameters, row, N, V):
                    if count <= LIMIT:
                        of_top_k, border, sure = find_border(
                            logits_row, listed_row, count, pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V,
                            top, temperature, parts, PARTS, LIMIT, TOP_K, TOP_P,
                        )  # fmt: skip
                    else:
                        border = exact_border(
                            logits_row, pivots, pivot_numbers, pivot_sums, carried, parameters, row, N, V, top, temperature,
                            floor, parts, PARTS, TOP_K, TOP_P,
                        )  # fmt: skip
            seed, index = row_parameter(parameters, 0, row, N), row_parameter(parameters, 1, row, N)
            position = row_parameter(parameters, 2, row, N)
            token = draw(
                logits_row, hits + row * HITS, num_hits, is_listed, border, top, temperature, floor, seed, index, position,
                V, TILE,
            )  # fmt: skip
            if TOP_P:
                is_unsure = ordered(tl.load(logits_row + token), token) < sure
                tl.store(undecided + row * 4 + 1, of_top_k.to(tl.int64, bitcast=True))
                tl.store(undecided + row * 4 + 2, border.to(tl.int64, bitcast=True))
                tl.store(undecided + row * 4 + 3, sure.to(tl.int64, bitcast=True))
    if TOP_P:
        tl.store(undecided + row * 4, is_unsure.to(tl.int64))
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(chosen + N + row, top.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit(do_not_specialize=["N"])
def weigh_exactly(
    logits, parameters, chosen, undecided, exact, N, V, stride, part, TILE: tl.constexpr
):  # fmt: skip
    """Masses per part of undecided rows, `[N, S, 2]`: what top_k leaves, and what top_p surely keeps."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(undecided + row * 4) != 0:
        top = tl.load(chosen + N + row).to(tl.int32).to(tl.float32, bitcast=True)
        temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
        of_top_k = tl.load(undecided + row * 4 + 1).to(tl.uint64, bitcast=True)
        sure = tl.load(undecided + row * 4 + 3).to(tl.uint64, bitcast=True)
        left, kept = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        begin = tl.program_id(1) * part
        end = tl.minimum(begin + part, V)
        for first in range(begin, end, TILE):
            at = first + tl.arange(0, TILE)
            values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
            y, numbers = scaled_logits(values, top, temperature), ordered(values, at)
            is_left = (y >= floor) & (numbers >= of_top_k)
            weights = tl.where(is_left, masses(tl.where(is_left, y, 0.0)), 0)
            left += weights
            kept += tl.where(numbers >= sure, weights, 0)
        place = exact + (row * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(place, tl.sum(left, 0))
        tl.store(place + 1, tl.sum(kept, 0))


@triton.jit(do_not_specialize=["N", "parts"])
def choose_again(
    logits, parameters, counts, hits, listed, undecided, exact, chosen, N, V, stride, parts,
    TILE: tl.constexpr, PARTS: tl.constexpr, HITS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The token of undecided rows."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(undecided + row * 4) != 0:
        top = tl.load(chosen + N + row).to(tl.int32).to(tl.float32, bitcast=True)
        temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
        share = row_parameter(parameters, 6, row, N).to(tl.float64, bitcast=True)
        part = tl.arange(0, PARTS)
        place, mask = exact + (row * parts + part) * 2, part < parts
        left = tl.sum(tl.load(place, mask=mask, other=0), 0)
        above = tl.sum(tl.load(place + 1, mask=mask, other=0), 0)
        border = refined_border(
            logits + row * stride, listed + row * LIMIT, tl.load(counts + N + row),
            tl.load(undecided + row * 4 + 2).to(tl.uint64, bitcast=True),
            tl.load(undecided + row * 4 + 3).to(tl.uint64, bitcast=True),
            share * left.to(tl.float64), above, top, temperature, LIMIT,
        )  # fmt: skip
        num_hits = tl.load(counts + row)
        token = draw(
            logits + row * stride, hits + row * HITS, num_hits, num_hits <= HITS, border, top, temperature, floor,
            row_parameter(parameters, 0, row, N), row_parameter(parameters, 1, row, N), row_parameter(parameters, 2, row, N),
            V, TILE,
        )  # fmt: skip
        tl.store(chosen + row, token.to(tl.int64))


def sample_tokens(logits: Tensor, rows: PackedRows, configs: LaunchConfigs) -> Tensor:
    """See `LayerOps.sample`. Rows of logits may be strided. Raises: ValueError for rows that do not fit, or other dtypes."""
    num_rows, vocab_size = logits.shape
    if logits.dtype is not torch.float32 or logits.stride(1) != 1 or rows.parameters.shape != (PARAMETERS, num_rows):
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} for {rows.parameters.shape[-1]} rows")
    if num_rows == 0 or vocab_size == 0:
        return torch.zeros((2, num_rows), dtype=torch.int64, device=logits.device)
    return SamplingLaunches(logits, rows, configs).run()


class SamplingLaunches:
    """The launches of one call, and the arrays that they pass on."""

    def __init__(self, logits: Tensor, rows: PackedRows, configs: LaunchConfigs) -> None:
        self._logits, self._configs, self._stages = logits, configs, rows.stages
        self._num_rows, self._vocab_size = logits.shape
        tile = configs.sample_tile
        self._part = tile * triton.cdiv(
            triton.cdiv(self._vocab_size, tile), max(1, configs.sample_programs // self._num_rows)
        )
        self._grid = (self._num_rows, triton.cdiv(self._vocab_size, self._part))
        # of one row, so that steps of other numbers of rows compile nothing
        self._most_parts = triton.next_power_of_2(min(triton.cdiv(self._vocab_size, tile), configs.sample_programs))
        self._parameters = rows.parameters.contiguous()
        # numbers of hits, and of the tokens between
        self.counts = self._empty(torch.int32, 2, self._num_rows)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)

    def run(self) -> Tensor:
        """`[2, N]` int64, see `choose`."""
        configs, stages, num_rows = self._configs, self._stages, self._num_rows
        # a fused multiplication and addition is rounded once, and a CPU's twice
        constants = {"num_warps": configs.sample_warps, "enable_fp_fusion": False}
        parts = {"PARTS": self._most_parts}
        limits = {"HITS": configs.sample_hits if stages.is_random else 1}
        cuts = {"TOP_K": stages.has_top_k, "TOP_P": stages.has_top_p}
        is_cut = stages.has_top_k or stages.has_top_p
        sizes = (num_rows, self._vocab_size, self._logits.stride(0))
        highest, lowest = self._empty(torch.float32, 2, *self._grid)
        ids = self._empty(torch.int32, *self._grid)
        hits = self._empty(torch.int32, num_rows, limits["HITS"])
        counts = self.counts
        if stages.is_random:
            counts.zero_()
        rows = (self._logits, self._parameters, highest, ids)
        scan_rows[self._grid](
            *rows, lowest, counts, hits, *sizes, self._part,
            TILE=configs.sample_tile, **limits, RANDOM=stages.is_random, CUT=is_cut, **constants,
        )  # fmt: skip
        limits["LIMIT"] = configs.sample_list if is_cut else 1
        found = tuple(self._weighed(highest, ids, lowest)) if is_cut else (lowest, ids, lowest, lowest)
        listed = self._empty(torch.int32, num_rows, limits["LIMIT"])
        registers = register_limit(configs.max_registers)
        if is_cut or stages.has_min_p:
            list_kept[self._grid](
                *rows, *found, counts, hits, listed, *sizes, self._part,
                TILE=configs.sample_tile, **parts, **limits, CUT=is_cut, **constants, **registers,
            )  # fmt: skip
        chosen = self._empty(torch.int64, 2, num_rows)
        undecided = self._empty(torch.int64, num_rows, 4) if stages.has_top_p else chosen
        constants_of_draws = {**constants, "num_warps": configs.sample_draw_warps, **registers}
        choose[(num_rows,)](
            *rows, *found, counts, hits, listed, undecided, chosen, *sizes, self._grid[1],
            TILE=configs.sample_draws, **parts, **limits, RANDOM=stages.is_random, **cuts, **constants_of_draws,
        )  # fmt: skip
        if stages.has_top_p:
            exact = self._empty(torch.int64, *self._grid, 2)
            weigh_exactly[self._grid](
                self._logits, self._parameters, chosen, undecided, exact, *sizes, self._part,
                TILE=configs.sample_pivot_tile, **constants, **registers,
            )  # fmt: skip
            choose_again[(num_rows,)](
                self._logits, self._parameters, counts, hits, listed, undecided, exact, chosen, *sizes, self._grid[1],
                TILE=configs.sample_draws, **parts, **limits, **constants_of_draws,
            )  # fmt: skip
        return chosen

    def _weighed(self, highest: Tensor, ids: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pivots `[N, 16]` of the last division, numbers and masses `[N, S, 16]`, and what is known from those before."""
        configs, stages, num_rows = self._configs, self._stages, self._num_rows
        options = {
            "TILE": configs.sample_pivot_tile, "PARTS": self._most_parts,
            "TOP_K": stages.has_top_k, "TOP_P": stages.has_top_p,
            "num_warps": configs.sample_warps, "enable_fp_fusion": False,
        }  # fmt: skip
        pivots = self._empty(torch.float32, DIVISIONS, num_rows, PIVOTS)
        sums = self._empty(torch.float32, DIVISIONS, *self._grid, PIVOTS)
        numbers = self._empty(torch.int32, DIVISIONS, *self._grid, PIVOTS)
        carried = self._empty(torch.float32, DIVISIONS, num_rows, 8)
        found = list(zip(pivots, numbers, sums, carried, strict=True))
        for turn in range(DIVISIONS):
            weigh_pivots[self._grid](
                self._logits, highest, ids, lowest, self._parameters, *found[max(0, turn - 1)], *found[turn],
                num_rows, self._vocab_size, self._logits.stride(0), self._part, TURN=turn, **options,
            )  # fmt: skip
        return found[-1]
