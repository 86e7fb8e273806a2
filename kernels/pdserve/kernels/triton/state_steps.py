"""Steps of states in a pool, one token per row: the gated delta rule and the selective scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.state.in_place_plan import num_decays
from pdserve.kernels.triton.launch_configs import LaunchConfigs
from pdserve.kernels.triton.pooled_states import PooledMatrices


@triton.jit(do_not_specialize=["layer", "num_sequences"])
def delta_step(
    states, blocks, query, key, value, decay, beta, out,
    block_stride, head_stride, layer_stride, layer, num_sequences, first,
    query_row, query_matrix, key_row, key_matrix, value_row, value_matrix, decay_row, decay_matrix, beta_row, beta_matrix,
    PER_HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_ONE_DECAY: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of a matrix of one row. Programs (row, matrix, block of columns). Reference: `delta_rule.delta_step`."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    before, after = tl.load(blocks + row), tl.load(blocks + num_sequences + row)
    numbers = (matrix // PER_HEAD) * head_stride + layer.to(tl.int64) * layer_stride + first
    numbers = numbers + (matrix % PER_HEAD) * ROWS * COLUMNS + r[:, None] * COLUMNS + c[None, :]
    state = tl.load(states + before * block_stride + numbers, mask=here & (before >= 0), other=0.0)
    k = tl.load(key + row * key_row + matrix * key_matrix + r, mask=r < ROWS, other=0.0)
    q = tl.load(query + row * query_row + matrix * query_matrix + r, mask=r < ROWS, other=0.0)
    v = tl.load(value + row * value_row + matrix * value_matrix + c, mask=c < COLUMNS, other=0.0)
    decays = decay + row * decay_row + matrix * decay_matrix
    if HAS_ONE_DECAY:
        state = state * tl.exp(tl.load(decays))
    else:
        state = state * tl.exp(tl.load(decays + r, mask=r < ROWS, other=0.0))[:, None]
    update = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + row * beta_row + matrix * beta_matrix)
    state += k[:, None] * update[None, :]
    tl.store(states + after * block_stride + numbers, state, mask=here & (after >= 0))
    found = tl.where(after >= 0, tl.sum(state * q[:, None], 0), 0.0)
    tl.store(out + (row * tl.num_programs(1) + matrix) * COLUMNS + c, found, mask=c < COLUMNS)


@triton.jit(do_not_specialize=["layer", "num_sequences"])
def scan_step(
    states, blocks, x, b, c, rates, steps, out,
    block_stride, head_stride, layer_stride, layer, num_sequences, first,
    x_row, x_matrix, b_row, b_matrix, c_row, c_matrix, rate_row, rate_matrix, step_row, step_matrix,
    PER_HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_ONE_DECAY: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of a matrix of one row. Programs (row, matrix, block of rows). Reference: `selective_scan.scan_step`."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_C)
    here = (r < ROWS)[:, None] & (n < COLUMNS)[None, :]
    before, after = tl.load(blocks + row), tl.load(blocks + num_sequences + row)
    numbers = (matrix // PER_HEAD) * head_stride + layer.to(tl.int64) * layer_stride + first
    numbers = numbers + (matrix % PER_HEAD) * ROWS * COLUMNS + r[:, None] * COLUMNS + n[None, :]
    state = tl.load(states + before * block_stride + numbers, mask=here & (before >= 0), other=0.0)
    own = tl.load(x + row * x_row + matrix * x_matrix + r, mask=r < ROWS, other=0.0)
    added = tl.load(b + row * b_row + matrix * b_matrix + n, mask=n < COLUMNS, other=0.0)
    read = tl.load(c + row * c_row + matrix * c_matrix + n, mask=n < COLUMNS, other=0.0)
    rate, step = rates + row * rate_row + matrix * rate_matrix, steps + row * step_row + matrix * step_matrix
    if HAS_ONE_DECAY:
        logs = tl.load(step) * tl.load(rate)
    else:
        own_rates = tl.load(rate + r[:, None] * COLUMNS + n[None, :], mask=here, other=0.0)
        logs = tl.load(step + r, mask=r < ROWS, other=0.0)[:, None] * own_rates
    state = state * tl.exp(logs) + own[:, None] * added[None, :]
    tl.store(states + after * block_stride + numbers, state, mask=here & (after >= 0))
    found = tl.where(after >= 0, tl.sum(state * read[None, :], 1), 0.0)
    tl.store(out + (row * tl.num_programs(1) + matrix) * ROWS + r, found, mask=r < ROWS)


def delta_rows(matrices: PooledMatrices, tokens: Sequence[Tensor], out: Tensor, configs: LaunchConfigs) -> None:
    """One launch. tokens: of `DELTA_RULE`, `[T, M, ...]`; out: `[T, M, ...]`, contiguous."""
    _launch(delta_step, 1, matrices, tokens, out, configs)


def scan_rows(matrices: PooledMatrices, tokens: Sequence[Tensor], out: Tensor, configs: LaunchConfigs) -> None:
    """One launch. tokens: of `SELECTIVE_SCAN`; out: as of `delta_rows`."""
    _launch(scan_step, 0, matrices, tokens, out, configs)


def _launch(
    kernel: Any, split: int, matrices: PooledMatrices, tokens: Sequence[Tensor], out: Tensor, configs: LaunchConfigs
) -> None:
    """split: the dimension of a matrix that is divided among programs."""
    pooled, shape, num_matrices = matrices.pooled, matrices.shape, out.shape[1]
    block = [triton.next_power_of_2(size) for size in shape]
    block[split] = min(block[split], max(1, configs.state_numbers // block[1 - split]))
    kernel[(pooled.num_decodes, num_matrices, triton.cdiv(shape[split], block[split]))](
        pooled.states, pooled.blocks, *tokens, out,
        *pooled.states.stride()[:3], pooled.layer, pooled.num_sequences, matrices.first, *strides_of(tokens),
        PER_HEAD=num_matrices // pooled.states.shape[1], ROWS=shape[0], COLUMNS=shape[1], BLOCK_R=block[0], BLOCK_C=block[1],
        HAS_ONE_DECAY=num_decays(tokens) == 1,
        num_warps=configs.state_warps, enable_fp_fusion=True,
    )  # fmt: skip


def strides_of(tokens: Sequence[Tensor]) -> list[int]:
    """From row to row and from matrix to matrix, of each."""
    return [stride for each in tokens for stride in each.stride()[:2]]
