"""Linear layers whose weights are numbers of 4 or 8 bits in groups, on a GPU: w4a16, w8a16 and fp8.

Up to `LaunchConfigs.grouped_rows` rows are multiplied by the packed numbers, since there the weight's bytes decide the time. How
programs divide the inputs among them depends only on the weight, so a row has the same bits in every batch of up to 16 rows. For
more rows than `grouped_rows`, parts of the weight are widened to the dtype of the inputs and multiplied by torch.

Where a matrix rounds its inputs (w8a8), any number of rows is multiplied by the packed numbers: the products are those of float8.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.layers.packed_groups import PackedGroups
from pdserve.kernels.triton.grouped_tile import add_run, rounded_inputs, tile_constants
from pdserve.kernels.triton.launch_configs import LaunchConfigs, launch_configs, register_limit

_FEWEST_ROWS = 16
"""The least that a product in tensor cores takes."""
_WIDENED_NUMEL = 1 << 24
"""Weights that are widened at once."""


@triton.jit(do_not_specialize=["num_rows"])
def multiply_groups(
    x, x_scales, values, scales, offsets, parts, x_stride, num_rows,
    IN: tl.constexpr, OUT: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`x W^T` of each SPLITSth run of inputs -> parts `[SPLITS, num_rows, OUT]` float32. Programs (rows, columns, split)."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (row < num_rows)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    split = tl.program_id(2)
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    scales_of_rows = x_scales + row.to(tl.int64)[:, None] * tl.cdiv(IN, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for run in range(split, RUNS, SPLITS):
        acc = add_run(
            acc, x_rows, scales_of_rows, is_row, values, scales, offsets, run, column, is_column,
            IN, OUT, WIDTH, GROUP, BITS, IS_FLOAT, HAS_OFFSETS, ROUNDED, PRECISION,
        )  # fmt: skip
    to = parts + (split * num_rows + row).to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(to, acc, mask=is_row & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def sum_parts(
    parts, bias, out, out_stride, num_rows,
    OUT: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of the parts in order, of the bias, and with ADDS of `out` -> out, rounded once. Programs (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < OUT
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + (split * num_rows + row) * OUT + column, mask=is_column, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    to = out + row * out_stride + column
    if ADDS:
        total += tl.load(to, mask=is_column, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["first_column", "end_column"])
def widen_groups(
    values, scales, offsets, out, first_column, end_column,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`value * scale + offset` in float32, rounded once, of the columns from first_column to end_column, and one run of inputs
    -> out `[columns, IN]`. Programs (run, columns)."""
    run = tl.program_id(0)
    number = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = first_column + number
    is_column = column < end_column
    k = tl.arange(0, WIDTH)
    tile = tl.load(
        values + (run * OUT + column).to(tl.int64)[:, None] * WIDTH + k[None, :], mask=is_column[:, None], other=0
    )
    for half in tl.static_range(8 // BITS):
        first = run * (WIDTH * 8 // BITS) + half * WIDTH
        at = first + k
        numbers = tile
        if BITS == 4:
            numbers = tile >> 4 if half else (tile << 4) >> 4
        elif IS_FLOAT:
            numbers = tile.to(tl.float8e4nv, bitcast=True)
        place = first // GROUP * OUT + column
        widened = numbers.to(tl.float32) * tl.load(scales + place, mask=is_column, other=0.0)[:, None]
        if HAS_OFFSETS:
            widened += tl.load(offsets + place, mask=is_column, other=0.0)[:, None]
        to = out + number.to(tl.int64)[:, None] * IN + at[None, :]
        tl.store(to, widened.to(out.dtype.element_ty), mask=is_column[:, None] & (at < IN)[None, :])


class TritonGroupedLinear:
    """Implements `Linear`. In Triton's interpreter also for CPUs, for tests."""

    def __init__(
        self, weight: GroupedMatrix | PackedGroups, bias: Tensor | None, configs: LaunchConfigs | None = None
    ) -> None:
        """configs: default: the row of the table of the weight's device."""
        self._weight = weight if isinstance(weight, PackedGroups) else PackedGroups.of(weight)
        self._bias = bias
        self._configs = configs or launch_configs(self._weight.values.device)
        num_tiles = triton.cdiv(self._weight.num_outputs, self._configs.grouped_columns)
        self._splits = max(1, min(self._weight.num_runs, self._configs.grouped_programs // num_tiles))

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty((len(x), self._weight.num_outputs))
        if self._multiplies(x):
            self._multiply(x, y, adds=False)
            return y
        for outputs, part in self.parts(x.dtype):
            torch.mm(x, part, out=y[:, outputs])
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._multiplies(x) and residual.stride(1) == 1:
            self._multiply(x, residual, adds=True)
            return residual
        return residual.add_(self(x))

    def _multiplies(self, x: Tensor) -> bool:
        return len(x) <= self._configs.grouped_rows or self._weight.rounds_inputs

    def _multiply(self, x: Tensor, out: Tensor, *, adds: bool) -> None:
        weight, configs, num_rows = self._weight, self._configs, len(x)
        if x.shape[1] != weight.num_inputs or out.shape != (num_rows, weight.num_outputs):
            raise ValueError(
                f"{tuple(x.shape)} -> {tuple(out.shape)} of a weight {weight.num_outputs, weight.num_inputs}"
            )
        if not num_rows:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        factors, scales = rounded_inputs(x, weight)
        rows, columns, splits, warps = (
            configs.grouped_rows,
            configs.grouped_columns,
            self._splits,
            configs.grouped_warps,
        )
        if num_rows <= _FEWEST_ROWS:
            rows = _FEWEST_ROWS
        elif num_rows > rows:
            rows, columns, splits, warps = configs.float8_rows, configs.float8_columns, 1, configs.float8_warps
        parts = torch.empty((splits, num_rows, weight.num_outputs), dtype=torch.float32, device=x.device)
        multiply_groups[(triton.cdiv(num_rows, rows), triton.cdiv(weight.num_outputs, columns), splits)](
            factors, scales, *weight.tensors, parts, factors.stride(0), num_rows,
            RUNS=weight.num_runs, BLOCK_M=rows, BLOCK_N=columns, SPLITS=splits, **tile_constants(weight),
            PRECISION="ieee" if factors.dtype is torch.float32 else "tf32", num_warps=warps,
            num_stages=configs.grouped_stages, enable_fp_fusion=True, **register_limit(configs.max_registers),
        )  # fmt: skip
        block = min(configs.sum_columns, triton.next_power_of_2(weight.num_outputs))
        sum_parts[(num_rows, triton.cdiv(weight.num_outputs, block))](
            parts, parts if self._bias is None else self._bias, out, out.stride(0), num_rows,
            OUT=weight.num_outputs, SPLITS=splits, HAS_BIAS=self._bias is not None, ADDS=adds, BLOCK=block,
            num_warps=configs.sum_warps, enable_fp_fusion=True,
        )  # fmt: skip

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Outputs, and their weights `[in, outputs]`, valid until the next part is taken."""
        weight, columns = self._weight, self._configs.grouped_columns
        at_once = max(columns, _WIDENED_NUMEL // weight.num_inputs)
        at_once = min(weight.num_outputs, at_once)
        room = torch.empty((at_once, weight.num_inputs), dtype=dtype, device=weight.values.device)
        for first in range(0, weight.num_outputs, at_once):
            end = min(weight.num_outputs, first + at_once)
            widen_groups[(weight.num_runs, triton.cdiv(end - first, columns))](
                *weight.tensors, room, first, end, BLOCK_N=columns, **tile_constants(weight),
                num_warps=self._configs.grouped_warps, enable_fp_fusion=True,
            )  # fmt: skip
            yield slice(first, end), room[: end - first].t()
