"""A mixture of experts in two launches, whose grids depend only on the numbers of tokens and experts."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.layers.expert_stack import ExpertStack, by_expert
from pdserve.kernels.layers.gated_activations import GatedActivation
from pdserve.kernels.layers.packed_groups import PackedGroups
from pdserve.kernels.triton.grouped_tile import add_run, rounded_inputs, tile_constants
from pdserve.kernels.triton.launch_configs import LaunchConfigs, register_limit

FEWEST_ROWS = 16
"""Rows of a program where experts have few: the least that a product in tensor cores takes."""


@triton.jit
def _find_rows(starts, tiles, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of this program's tile, NUM_EXPERTS after the last, and the tile's places in the list of rows."""
    tile = tl.program_id(1)
    number = tl.arange(0, BLOCK_E)
    ends = tl.load(tiles + 1 + number, mask=number < NUM_EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    first = tile - tl.load(tiles + expert)
    place = tl.load(starts + expert) + first * BLOCK_M + tl.arange(0, BLOCK_M)
    return expert, place


@triton.jit
def activate_rows(
    x, x_scales, gate_up, scales, offsets, bias, inner, order, starts, tiles, x_stride, alpha, limit, shift,
    TOP_K: tl.constexpr, IN: tl.constexpr, SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BITS: tl.constexpr, OUT: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """`act(gate x, up x)` in float32, rounded once, for BLOCK_M rows of one expert and BLOCK_N of its SIZE columns.

    Without a gate `max(up x, 0)^2`, and matrices and biases have half the rows.

    order: numbers of the pairs of token and expert, sorted by expert, those of expert e from starts[e] on; tiles[e]: number of the
    expert's first tile -> inner `[T * k, SIZE]` in this order. Programs (columns, tile); those after the last tile end at once.
    """
    expert, place = _find_rows(starts, tiles, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert < NUM_EXPERTS:
        end = tl.load(starts + expert + 1)
        is_row = (place < end)[:, None]
        token = tl.load(order + place, mask=place < end, other=0) // TOP_K
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (column < SIZE)[None, :]
        k = tl.arange(0, BLOCK_K)
        x_rows = x + token.to(tl.int64)[:, None] * x_stride
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if BITS:
            packed = gate_up + expert.to(tl.int64) * (RUNS * OUT * WIDTH)
            own_scales, own_offsets = scales + expert * (GROUPS * OUT), offsets + expert * (GROUPS * OUT)
            scales_of_rows = x_scales + token.to(tl.int64)[:, None] * tl.cdiv(IN, GROUP)
            for run in range(RUNS):
                if IS_GATED:
                    gate = add_run(
                        gate, x_rows, scales_of_rows, is_row, packed, own_scales, own_offsets, run, column, column < SIZE,
                        IN, OUT, WIDTH, GROUP, BITS, IS_FLOAT, HAS_OFFSETS, ROUNDED, PRECISION,
                    )  # fmt: skip
                row = IS_GATED * SIZE + column
                up = add_run(
                    up, x_rows, scales_of_rows, is_row, packed, own_scales, own_offsets, run, row, column < SIZE,
                    IN, OUT, WIDTH, GROUP, BITS, IS_FLOAT, HAS_OFFSETS, ROUNDED, PRECISION,
                )  # fmt: skip
        else:
            gates = gate_up + (expert.to(tl.int64) * (1 + IS_GATED) * SIZE + column)[None, :] * IN
            for start in range(0, IN, BLOCK_K):
                at = start + k
                values = tl.load(x_rows + at[None, :], mask=is_row & (at < IN)[None, :], other=0.0)
                is_there = (at < IN)[:, None] & is_column
                if IS_GATED:
                    matrix = tl.load(gates + at[:, None], mask=is_there, other=0.0)
                    gate = tl.dot(values, matrix, gate, input_precision=PRECISION)
                matrix = tl.load(gates + IS_GATED * SIZE * IN + at[:, None], mask=is_there, other=0.0)
                up = tl.dot(values, matrix, up, input_precision=PRECISION)
        if HAS_BIAS:
            biases = bias + expert * (1 + IS_GATED) * SIZE + column
            if IS_GATED:
                gate += tl.load(biases, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + IS_GATED * SIZE, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        # comparisons, so that NaN stays
        if IS_GATED:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            made = gate / (1.0 + tl.exp(-alpha * gate)) * (up + shift)
        else:
            up = tl.where(up < 0.0, 0.0, up)
            made = up * up
        to = inner + place.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(to, made.to(inner.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def multiply_rows(
    inner, inner_scales, down, scales, offsets, bias, weights, out, order, starts, tiles,
    IN: tl.constexpr, SIZE: tl.constexpr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BITS: tl.constexpr, OUT: tl.constexpr, RUNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    IS_FLOAT: tl.constexpr, HAS_OFFSETS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """`weight * (down inner + bias)` -> out `[T * k, SIZE]`, by the pair's number. See `activate_rows`."""
    expert, place = _find_rows(starts, tiles, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert < NUM_EXPERTS:
        end = tl.load(starts + expert + 1)
        is_row = (place < end)[:, None]
        number = tl.load(order + place, mask=place < end, other=0)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = (column < SIZE)[None, :]
        k = tl.arange(0, BLOCK_K)
        rows = inner + place.to(tl.int64)[:, None] * IN
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if BITS:
            packed = down + expert.to(tl.int64) * (RUNS * OUT * WIDTH)
            own_scales, own_offsets = scales + expert * (GROUPS * OUT), offsets + expert * (GROUPS * OUT)
            scales_of_rows = inner_scales + place.to(tl.int64)[:, None] * tl.cdiv(IN, GROUP)
            for run in range(RUNS):
                acc = add_run(
                    acc, rows, scales_of_rows, is_row, packed, own_scales, own_offsets, run, column, column < SIZE,
                    IN, OUT, WIDTH, GROUP, BITS, IS_FLOAT, HAS_OFFSETS, ROUNDED, PRECISION,
                )  # fmt: skip
        else:
            downs = down + (expert.to(tl.int64) * SIZE + column)[None, :] * IN
            for start in range(0, IN, BLOCK_K):
                at = start + k
                values = tl.load(rows + at[None, :], mask=is_row & (at < IN)[None, :], other=0.0)
                matrix = tl.load(downs + at[:, None], mask=(at < IN)[:, None] & is_column, other=0.0)
                acc = tl.dot(values, matrix, acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + expert * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        acc *= tl.load(weights + number, mask=place < end, other=0.0).to(tl.float32)[:, None]
        to = out + number.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=is_row & is_column)


def grouped_experts(
    x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack, activation: GatedActivation, configs: LaunchConfigs
) -> Tensor:
    """See `LayerOps.grouped_experts`. x: rows may be strided."""
    num_tokens, top_k = experts.shape
    num_experts, size, inner_size = stack.num_experts, stack.size, stack.inner_size
    if x.shape != (num_tokens, size) or x.stride(1) != 1 or weights.shape != experts.shape:
        raise ValueError(
            f"x {tuple(x.shape)} {x.stride()} and weights {tuple(weights.shape)} with experts {tuple(experts.shape)} of {size} "
            "inputs"
        )
    if any(isinstance(each, Tensor) and each.dtype is not x.dtype for each in (stack.gate_up, stack.down)):
        raise ValueError(f"x of {x.dtype} with matrices of another dtype")
    num_places = num_tokens * top_k
    out = x.new_empty((num_places, size))
    if num_places:
        is_many = num_places >= num_experts * configs.expert_rows
        rows = configs.expert_rows if is_many else FEWEST_ROWS
        order, counts = by_expert(experts, num_experts)
        lists = torch.zeros((2, num_experts + 1), dtype=torch.int32, device=x.device)
        torch.cumsum(torch.stack((counts, (counts + (rows - 1)) // rows)), 1, dtype=torch.int32, out=lists[:, 1:])
        starts, tiles = lists.unbind()
        # full tiles, and one per expert that has rows
        num_tiles = num_places // rows + min(num_experts, num_places)
        inner = x.new_empty((num_places, inner_size))
        is_exact = x.dtype is torch.float32
        inputs, columns = configs.expert_inputs // (2 if is_exact else 1), configs.expert_columns
        common = {
            "NUM_EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts), "BLOCK_M": rows, "BLOCK_N": columns,
            "BLOCK_K": inputs, "PRECISION": "ieee" if is_exact else "tf32", "num_warps": configs.expert_warps,
            "num_stages": configs.expert_stages, "enable_fp_fusion": True, **register_limit(configs.max_registers),
        }  # fmt: skip
        limit = activation.limit if math.isfinite(activation.limit) else torch.finfo(torch.float32).max
        gate_up, down = _arguments(stack.gate_up), _arguments(stack.down)
        # any address where there are no biases: none is read
        gate_up_bias = x if stack.gate_up_bias is None else stack.gate_up_bias
        down_bias = x if stack.down_bias is None else stack.down_bias
        factors, scales = _rounded(x, stack.gate_up)
        activate_rows[(triton.cdiv(inner_size, columns), num_tiles)](
            factors, scales, *gate_up, gate_up_bias, inner, order, starts, tiles, factors.stride(0),
            activation.alpha, limit, activation.shift,
            TOP_K=top_k, SIZE=inner_size, HAS_BIAS=stack.gate_up_bias is not None, IS_GATED=int(activation.is_gated),
            **_constants(stack.gate_up, size), **common,
        )  # fmt: skip
        factors, scales = _rounded(inner, stack.down)
        multiply_rows[(triton.cdiv(size, columns), num_tiles)](
            factors, scales, *down, down_bias, weights.contiguous(), out, order, starts, tiles,
            SIZE=size, HAS_BIAS=stack.down_bias is not None, **_constants(stack.down, inner_size), **common,
        )  # fmt: skip
    return out.view(num_tokens, top_k, size).sum(1)


def _rounded(x: Tensor, matrices: Tensor | PackedGroups) -> tuple[Tensor, Tensor]:
    return (x, x) if isinstance(matrices, Tensor) else rounded_inputs(x, matrices)


def _arguments(matrices: Tensor | PackedGroups) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and offsets; any address for what is not read."""
    return (matrices, matrices, matrices) if isinstance(matrices, Tensor) else matrices.tensors


def _constants(matrices: Tensor | PackedGroups, num_inputs: int) -> dict[str, Any]:
    if isinstance(matrices, Tensor):
        return {
            "IN": num_inputs, "BITS": 0, "OUT": 0, "RUNS": 0, "WIDTH": 0, "GROUP": 0, "GROUPS": 0, "IS_FLOAT": False,
            "HAS_OFFSETS": False, "ROUNDED": False,
        }  # fmt: skip
    return tile_constants(matrices) | {"RUNS": matrices.num_runs, "GROUPS": matrices.scales.shape[1]}
