"""One tile of a product with numbers of 4 or 8 bits in groups, for linear layers and experts."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.layers.packed_groups import PackedGroups


@triton.jit
def _add_tile(
    acc, x_rows, x_scales, is_row, values, scales, offsets, first, column, is_column,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc += (x values^T) * scales + sum(x) * offsets` for WIDTH inputs from `first` on, which lie in one group.

    The numbers are exact in the dtype of x, so only its products with them are rounded, in float32.
    ROUNDED: x is in float8, and times its scale of this group.
    """
    at = first + tl.arange(0, WIDTH)
    x = tl.load(x_rows + at[None, :], mask=is_row & (at < IN)[None, :], other=0.0)
    place = first // GROUP * OUT + column
    product = tl.dot(x, values.to(x.dtype), input_precision=PRECISION)
    if ROUNDED:
        product *= tl.load(x_scales + first // GROUP, mask=is_row, other=0.0)
    acc += product * tl.load(scales + place, mask=is_column, other=0.0)[None, :]
    if HAS_OFFSETS:
        acc += tl.sum(x.to(tl.float32), 1)[:, None] * tl.load(offsets + place, mask=is_column, other=0.0)[None, :]
    return acc


@triton.jit
def add_run(
    acc, x_rows, x_scales, is_row, values, scales, offsets, run, column, is_column,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc `[rows, columns]` float32 plus the product over run number `run` of the inputs: see `PackedGroups`.

    x_rows, x_scales `[rows, 1]`: addresses; is_row `[rows, 1]`; column, is_column `[columns]`.
    """
    k = tl.arange(0, WIDTH)
    tile = tl.load(
        values + (run * OUT + column).to(tl.int64)[None, :] * WIDTH + k[:, None], mask=is_column[None, :], other=0
    )
    first = run * (WIDTH * 8 // BITS)
    if BITS == 4:
        acc = _add_tile(
            acc, x_rows, x_scales, is_row, (tile << 4) >> 4, scales, offsets, first, column, is_column, IN, OUT, WIDTH, GROUP,
            HAS_OFFSETS, ROUNDED, PRECISION,
        )  # fmt: skip
        acc = _add_tile(
            acc, x_rows, x_scales, is_row, tile >> 4, scales, offsets, first + WIDTH, column, is_column, IN, OUT, WIDTH, GROUP,
            HAS_OFFSETS, ROUNDED, PRECISION,
        )  # fmt: skip
    else:
        if IS_FLOAT:
            tile = tile.to(tl.float8e4nv, bitcast=True)
        acc = _add_tile(
            acc, x_rows, x_scales, is_row, tile, scales, offsets, first, column, is_column, IN, OUT, WIDTH, GROUP, HAS_OFFSETS,
            ROUNDED, PRECISION,
        )  # fmt: skip
    return acc


@triton.jit
def round_inputs(x, values, scales, x_stride, IN: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """See `float8_inputs`. Rows are `x_stride` apart; without x's numbers after the last input. Programs (row, group)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, BLOCK)
    at = group * GROUP + number
    is_there = (number < GROUP) & (at < IN)
    found = tl.load(x + row * x_stride + at, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(found), 0), 1e-30) / 448.0
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    tl.store(values + row * IN + at, (found / scale).to(tl.float8e4nv), mask=is_there)


def rounded_inputs(x: Tensor, matrix: PackedGroups) -> tuple[Tensor, Tensor]:
    """What a kernel multiplies by the matrix: rows `[T, in]`, and their scales `[T, groups]`, or any tensor in place of these."""
    if not matrix.rounds_inputs:
        return x, x
    num_groups = triton.cdiv(matrix.num_inputs, matrix.group_size)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), num_groups), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(min(matrix.group_size, matrix.num_inputs))
    round_inputs[(len(x), num_groups)](
        x, values, scales, x.stride(0), IN=matrix.num_inputs, GROUP=matrix.group_size, BLOCK=block,
        num_warps=min(8, max(1, block // 512)), enable_fp_fusion=True,
    )  # fmt: skip
    return values, scales


def tile_constants(matrix: PackedGroups) -> dict[str, Any]:
    """The constants of `add_run` but PRECISION."""
    return {
        "IN": matrix.num_inputs, "OUT": matrix.num_outputs, "WIDTH": matrix.width, "GROUP": matrix.group_size,
        "BITS": matrix.num_bits, "IS_FLOAT": matrix.is_float, "HAS_OFFSETS": matrix.offsets is not None,
        "ROUNDED": matrix.rounds_inputs,
    }  # fmt: skip
