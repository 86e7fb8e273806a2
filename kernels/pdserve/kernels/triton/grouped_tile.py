"""One tile of a product with numbers of 4 or 8 bits in groups, for linear layers and experts."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pdserve.kernels.layers.packed_groups import PackedGroups


@triton.jit
def _add_tile(
    acc, x_rows, is_row, values, scales, offsets, first, column, is_column,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc += (x values^T) * scales + sum(x) * offsets` for WIDTH inputs from `first` on, which lie in one group.

    The numbers are exact in the dtype of x, so only its products with them are rounded, in float32.
    """
    at = first + tl.arange(0, WIDTH)
    x = tl.load(x_rows + at[None, :], mask=is_row & (at < IN)[None, :], other=0.0)
    place = first // GROUP * OUT + column
    product = tl.dot(x, values.to(x.dtype), input_precision=PRECISION)
    acc += product * tl.load(scales + place, mask=is_column, other=0.0)[None, :]
    if HAS_OFFSETS:
        acc += tl.sum(x.to(tl.float32), 1)[:, None] * tl.load(offsets + place, mask=is_column, other=0.0)[None, :]
    return acc


@triton.jit
def add_run(
    acc, x_rows, is_row, values, scales, offsets, run, column, is_column,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_OFFSETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc `[rows, columns]` float32 plus the product over run number `run` of the inputs: see `PackedGroups`.

    x_rows `[rows, 1]`: addresses; is_row `[rows, 1]`; column, is_column `[columns]`.
    """
    k = tl.arange(0, WIDTH)
    tile = tl.load(
        values + (run * OUT + column).to(tl.int64)[None, :] * WIDTH + k[:, None], mask=is_column[None, :], other=0
    )
    first = run * (WIDTH * 8 // BITS)
    if BITS == 4:
        acc = _add_tile(
            acc, x_rows, is_row, (tile << 4) >> 4, scales, offsets, first, column, is_column, IN, OUT, WIDTH, GROUP, HAS_OFFSETS,
            PRECISION,
        )  # fmt: skip
        acc = _add_tile(
            acc, x_rows, is_row, tile >> 4, scales, offsets, first + WIDTH, column, is_column, IN, OUT, WIDTH, GROUP, HAS_OFFSETS,
            PRECISION,
        )  # fmt: skip
    else:
        if IS_FLOAT:
            tile = tile.to(tl.float8e4nv, bitcast=True)
        acc = _add_tile(
            acc, x_rows, is_row, tile, scales, offsets, first, column, is_column, IN, OUT, WIDTH, GROUP, HAS_OFFSETS, PRECISION,
        )  # fmt: skip
    return acc


def tile_constants(matrix: PackedGroups) -> dict[str, Any]:
    """The constants of `add_run` but PRECISION."""
    return {
        "IN": matrix.num_inputs, "OUT": matrix.num_outputs, "WIDTH": matrix.width, "GROUP": matrix.group_size,
        "BITS": matrix.num_bits, "IS_FLOAT": matrix.is_float, "HAS_OFFSETS": matrix.offsets is not None,
    }  # fmt: skip
