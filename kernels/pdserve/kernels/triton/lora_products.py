"""LoRA products of tokens with different adapters, in two launches that depend only on the number of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.lora.lora_linear import LoraStack
from pdserve.kernels.triton.launch_configs import LaunchConfigs, register_limit

TOKENS = 16
"""Tokens of a program: the least that a product in tensor cores takes."""


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_tokens(
    x, a, tokens, starts, shrunk, x_stride, num_tokens,
    IN: tl.constexpr, ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`x A^T` over a part of the inputs, for BLOCK_T tokens of one slot and BLOCK_R rows of its A.

    Programs (tile, slot, block of rows and part); those after a slot's last token end at once. tokens are sorted by slot, those of
    slot s from starts[s] on -> shrunk `[SPLITS, num_tokens, ROWS]` float32, by place in tokens. Reference: `TorchLoraOps`.
    """
    slot = tl.program_id(1)
    first = tl.load(starts + slot) + tl.program_id(0) * BLOCK_T
    end = tl.load(starts + slot + 1)
    if first < end:
        place = first + tl.arange(0, BLOCK_T)
        is_token = (place < end)[:, None]
        token = tl.load(tokens + place, mask=place < end, other=0)
        split = tl.program_id(2) % SPLITS
        row = tl.program_id(2) // SPLITS * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row = (row < ROWS)[None, :]
        k = tl.arange(0, BLOCK_K)
        x_rows = x + token.to(tl.int64)[:, None] * x_stride
        a_rows = a + (slot * ROWS + row).to(tl.int64)[None, :] * IN
        acc = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for start in range(split * BLOCK_K, IN, SPLITS * BLOCK_K):
            at = start + k
            values = tl.load(x_rows + at[None, :], mask=is_token & (at < IN)[None, :], other=0.0)
            matrix = tl.load(a_rows + at[:, None], mask=is_row & (at < IN)[:, None], other=0.0)
            acc = tl.dot(values, matrix, acc, input_precision=PRECISION)
        spot = (split * num_tokens + place).to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(shrunk + spot, acc, mask=is_token & is_row)


@triton.jit(do_not_specialize=["num_tokens"])
def add_products(
    y, b, shrunk, tokens, starts, tiles, y_stride, num_tokens,
    OUT: tl.constexpr, ROWS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`y += shrunk B` for BLOCK_T tokens of one slot and a tile of columns; the parts of shrunk are summed in order.

    tiles `[n, 3]`: first row of shrunk, first column, and end of the columns, all of one product; ALIGN divides all three.
    """
    slot = tl.program_id(1)
    first = tl.load(starts + slot) + tl.program_id(0) * BLOCK_T
    end = tl.load(starts + slot + 1)
    if first < end:
        place = first + tl.arange(0, BLOCK_T)
        is_token = (place < end)[:, None]
        token = tl.load(tokens + place, mask=place < end, other=0)
        tile = tiles + tl.program_id(2) * 3
        first_row = tl.multiple_of(tl.load(tile), ALIGN)
        first_column = tl.multiple_of(tl.load(tile + 1), ALIGN)
        column = first_column + tl.arange(0, BLOCK_N)
        is_column = (column < tl.multiple_of(tl.load(tile + 2), ALIGN))[None, :]
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, MAX_RANK, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            weights = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for split in range(SPLITS):
                spot = (split * num_tokens + place).to(tl.int64)[:, None] * ROWS + (first_row + r)[None, :]
                weights += tl.load(shrunk + spot, mask=is_token & (r < MAX_RANK)[None, :], other=0.0)
            b_rows = b + (slot * MAX_RANK + r).to(tl.int64)[:, None] * OUT
            matrix = tl.load(b_rows + column[None, :], mask=(r < MAX_RANK)[:, None] & is_column, other=0.0)
            acc = tl.dot(weights.to(matrix.dtype), matrix, acc, input_precision=PRECISION)
        to = y + token.to(tl.int64)[:, None] * y_stride + column[None, :]
        given = tl.load(to, mask=is_token & is_column, other=0.0).to(tl.float32)
        tl.store(to, (given + acc).to(y.dtype.element_ty), mask=is_token & is_column)


def column_tiles(stack: LoraStack, configs: LaunchConfigs) -> Tensor:
    """`[n, 3]` int32 on the stack's device: see `add_products`."""
    size = configs.lora_columns
    tiles = [
        (index * stack.max_rank, first, min(first + size, columns.stop))
        for index, columns in enumerate(stack.columns)
        for first in range(columns.start, columns.stop, size)
    ]
    return torch.tensor(tiles, dtype=torch.int32).to(stack.a.device)


def add_lora(
    y: Tensor, x: Tensor, stack: LoraStack, tiles: Tensor, tokens: Tensor, starts: Tensor, configs: LaunchConfigs
) -> None:
    """Two launches. y `[T, out]`, changed in place, and x `[T, in]`: rows may be strided; tiles: of `column_tiles`; tokens `[>= K]`
    int32, sorted by slot; starts `[slots + 1]` int32."""
    num_tokens, (num_slots, num_rows, in_size), out_size = len(x), stack.a.shape, stack.b.shape[2]
    if x.shape != (num_tokens, in_size) or y.shape != (num_tokens, out_size) or (x.stride(1), y.stride(1)) != (1, 1):
        raise ValueError(
            f"x {tuple(x.shape)} {x.stride()} and y {tuple(y.shape)} {y.stride()} with {in_size} to {out_size}"
        )
    if not x.dtype is y.dtype is stack.a.dtype:
        raise ValueError(f"x of {x.dtype} and y of {y.dtype} with matrices of {stack.a.dtype}")
    if not num_tokens:
        return
    splits, num_tiles = configs.lora_splits, triton.cdiv(num_tokens, TOKENS)
    shrunk = torch.empty((splits, num_tokens, num_rows), dtype=torch.float32, device=x.device)
    rows = min(configs.lora_rows, max(16, triton.next_power_of_2(num_rows)))
    is_exact = x.dtype is torch.float32
    precision = "ieee" if is_exact else "tf32"
    # an exact product keeps its operands in registers
    ranks = 16 if is_exact else min(configs.lora_rows, max(16, triton.next_power_of_2(stack.max_rank)))
    shrink_tokens[(num_tiles, num_slots, triton.cdiv(num_rows, rows) * splits)](
        x, stack.a, tokens, starts, shrunk, x.stride(0), num_tokens,
        IN=in_size, ROWS=num_rows, BLOCK_T=TOKENS, BLOCK_R=rows, BLOCK_K=configs.lora_inputs, SPLITS=splits,
        PRECISION=precision, num_warps=configs.lora_warps, enable_fp_fusion=True,
        **register_limit(configs.max_registers),
    )  # fmt: skip
    align = 16 if all(number % 16 == 0 for number in (*stack.ends, configs.lora_columns, stack.max_rank)) else 1
    add_products[(num_tiles, num_slots, len(tiles))](
        y, stack.b, shrunk, tokens, starts, tiles, y.stride(0), num_tokens,
        OUT=out_size, ROWS=num_rows, MAX_RANK=stack.max_rank, BLOCK_T=TOKENS, BLOCK_N=configs.lora_columns,
        BLOCK_R=ranks, SPLITS=splits, ALIGN=align,
        PRECISION=precision, num_warps=configs.lora_warps, enable_fp_fusion=True,
        **register_limit(configs.max_registers),
    )  # fmt: skip
