"""Greedy and random sampling on a device, by the rules of `engine/sampling/kept_tokens.py` and `token_draw.py`. Nothing is sorted.

Programs divide each row into parts; every launch is one pass over the logits, and no program waits for another. N rows, S parts:

    find_extremes    highest logit with its lowest id, and lowest logit, of each part           grid (N, S)
    fill_bins        masses and number of tokens in 2,048 bins of equal width in y              grid (N, S)   with top_k or top_p
    list_bin         ids of the tokens in the bin that contains the border of top_k             grid (N, S)   with top_k
    find_border      the border among them                                                      grid (N,)     with top_k
    list_bin, find_border   for top_p, over the tokens that top_k keeps                                       with top_p
    draw_parts       highest sum of y and noise of each part                                    grid (N, S)   with random rows
    choose           the token of each row                                                      grid (N,)

Equality with the processor: noise, order, ties and y are the same bits. Two results are rounded elsewhere: `exp` of a mass (some
units in the last place of float32: the border of top_p may lie one token further), and the noise, which is computed in float64 with
another logarithm (one unit in the last place of float32 in fewer than 1 in 10^6 numbers).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.sampled_rows import PARAMETERS, PackedRows
from pdserve.kernels.triton.kept_border import BINS, fill_bins, find_border, list_bin
from pdserve.kernels.triton.launch_configs import LaunchConfigs, register_limit
from pdserve.kernels.triton.noise import exact_gumbel, noise_bits, rough_gumbel
from pdserve.kernels.triton.sampled_row import (
    float_parameter,
    is_drawn,
    ordered,
    row_parameter,
    scaled_logits,
    top_of_row,
)

_SLACK = tl.constexpr(1e-3)
"""Sums of rough noise this near to the highest are computed exactly."""
_SEARCH_TILE = 128
"""Tokens that a pass of the search holds at once, each compared with 16 thresholds."""


@triton.jit
def find_extremes(logits, highest, highest_id, lowest, V, stride, part, TILE: tl.constexpr):
    """Per part: its highest logit, the lowest id that has it, and its lowest finite logit."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, V)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_at = begin + tl.arange(0, TILE)
    least = tl.full((TILE,), float("inf"), tl.float32)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
        is_higher = values > best
        best, best_at = tl.where(is_higher, values, best), tl.where(is_higher, at, best_at)
        least = tl.where((values < least) & (values > float("-inf")), values, least)
    top = tl.max(best, 0)
    tl.store(highest + place, top)
    tl.store(highest_id + place, tl.minimum(tl.min(tl.where(best == top, best_at, V), 0), V - 1))
    tl.store(lowest + place, tl.min(least, 0))


@triton.jit
def draw_parts(
    logits, highest, highest_id, parameters, borders, sums, sum_ids, N, V, stride, part, TILE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Per part: the highest sum of y and noise among the kept tokens, and the lowest id that has it; -inf if none is kept.

    Rough noise finds the few tokens that can win, whose noise is then computed exactly, one after the other.
    """
    row, parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    top, _ = top_of_row(highest, highest_id, row, parts, PARTS)
    temperature, floor = float_parameter(parameters, 4, row, N), float_parameter(parameters, 5, row, N)
    seed, index = row_parameter(parameters, 0, row, N), row_parameter(parameters, 1, row, N)
    position = row_parameter(parameters, 2, row, N)
    border = tl.load(borders + row).to(tl.uint64, bitcast=True)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.full((), 0, tl.int32)
    begin = tl.program_id(1) * part
    end = tl.where(is_drawn(top, temperature), tl.minimum(begin + part, V), begin)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + at, mask=at < end, other=float("-inf"))
        y = scaled_logits(values, top, temperature)
        is_kept = (y >= floor) & (ordered(values, at) >= border) & (at < end)
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            bits = noise_bits(first, seed, index, position, TILE)
            rough = tl.where(is_kept, y + rough_gumbel(bits), float("-inf"))
            bound = tl.maximum(tl.max(rough, 0), best) - _SLACK
            token = tl.min(tl.where(rough >= bound, at, V), 0)
            while token < V:
                is_it = at == token
                its_y = tl.max(tl.where(is_it, y, float("-inf")), 0)
                total = its_y + exact_gumbel(tl.max(tl.where(is_it, bits, 0), 0))
                best_id = tl.where(total > best, token, best_id)
                best = tl.maximum(total, best)
                token = tl.min(tl.where((rough >= bound) & (at > token), at, V), 0)
    place = tl.program_id(0) * parts + tl.program_id(1)
    tl.store(sums + place, best)
    tl.store(sum_ids + place, best_id)


@triton.jit
def choose(highest, highest_id, sums, sum_ids, parameters, chosen, N, parts, PARTS: tl.constexpr, RANDOM: tl.constexpr):
    """`chosen[0, n]`: the row's token; `chosen[1, n]`: the bits of its highest logit."""
    row = tl.program_id(0).to(tl.int64)
    top, token = top_of_row(highest, highest_id, row, parts, PARTS)
    if RANDOM:
        temperature = float_parameter(parameters, 4, row, N)
        _, drawn = top_of_row(sums, sum_ids, row, parts, PARTS)
        token = tl.where(is_drawn(top, temperature), drawn, token)
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(chosen + N + row, top.to(tl.int32, bitcast=True).to(tl.int64))


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
        self._logits, self._configs = logits, configs
        self._num_rows, self._vocab_size = logits.shape
        tile = configs.sample_tile
        self._part = tile * triton.cdiv(
            triton.cdiv(self._vocab_size, tile), max(1, configs.sample_programs // self._num_rows)
        )
        self._parts = triton.cdiv(self._vocab_size, self._part)
        self._grid = (self._num_rows, self._parts)
        self._stages = rows.stages
        self._parameters = rows.parameters.contiguous()

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)

    def run(self) -> Tensor:
        """`[2, N]` int64, see `choose`."""
        # a fused multiplication and addition is rounded once, and a processor's twice
        constants = {"num_warps": self._configs.sample_warps, "enable_fp_fusion": False}
        parts = {**constants, "PARTS": triton.next_power_of_2(self._parts)}
        sizes = (self._vocab_size, self._logits.stride(0), self._part)
        highest, lowest, sums = self._empty(torch.float32, 3, *self._grid)
        ids, sum_ids = self._empty(torch.int32, 2, *self._grid)
        find_extremes[self._grid](
            self._logits, highest, ids, lowest, *sizes, TILE=self._configs.sample_tile, **constants
        )
        if self._stages.is_random:
            borders = self._borders(highest, ids, lowest, parts)
            draw_parts[self._grid](
                self._logits, highest, ids, self._parameters, borders, sums, sum_ids, self._num_rows, *sizes,
                TILE=self._configs.sample_tile, **parts,
            )  # fmt: skip
        chosen = self._empty(torch.int64, 2, self._num_rows)
        choose[(self._num_rows,)](
            highest,
            ids,
            sums,
            sum_ids,
            self._parameters,
            chosen,
            self._num_rows,
            self._parts,
            RANDOM=self._stages.is_random,
            **parts,
        )
        return chosen

    def _borders(self, highest: Tensor, ids: Tensor, lowest: Tensor, parts: dict[str, int]) -> Tensor:
        """`[N]` int64, the bits of each row's border; 0 keeps all."""
        device, num_rows, tile = self._logits.device, self._num_rows, self._configs.sample_tile
        borders = torch.zeros(num_rows, dtype=torch.int64, device=device)
        if not self._stages.has_top_k and not self._stages.has_top_p:
            return borders
        bins = torch.zeros((2, num_rows, BINS), dtype=torch.int64, device=device)
        rows = (self._logits, highest, ids, lowest, self._parameters)
        sizes = (num_rows, self._vocab_size, self._logits.stride(0))
        fill_bins[self._grid](*rows, bins, *sizes, self._part, TILE=tile, **parts)
        kept_mass = self._empty(torch.int64, num_rows)
        limit, registers = self._configs.sample_list, register_limit(self._configs.max_registers)
        listed, counts = (
            self._empty(torch.int32, num_rows, limit),
            torch.zeros((2, num_rows), dtype=torch.int64, device=device),
        )
        for is_top_p, is_used in enumerate((self._stages.has_top_k, self._stages.has_top_p)):
            if is_used:
                constants = {"LIMIT": limit, "TOP_P": bool(is_top_p), "AFTER_TOP_K": self._stages.has_top_k, **parts}
                of_stage = (*rows, bins, kept_mass, borders, listed, counts[is_top_p])
                list_bin[self._grid](*of_stage, *sizes, self._part, TILE=tile, **constants)
                find_border[(num_rows,)](*of_stage, *sizes, self._parts, TILE=_SEARCH_TILE, **constants, **registers)
        return borders
