"""Steps of states in a pool, one token per row: a convolution, the gated delta rule and the selective scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.state.causal_conv import CausalConv
from pdserve.kernels.state.in_place_plan import num_decays
from pdserve.kernels.triton.launch_configs import LaunchConfigs


@dataclass(frozen=True, slots=True)
class RowStates:
    """The states of one layer, and where a step's rows have theirs."""

    states: Tensor
    """`[num_blocks, H, L, N]` float32, contiguous."""
    blocks: Tensor
    """`[2, rows]` int64, contiguous: see `InPlacePlan`."""
    layer: int

    @property
    def num_rows(self) -> int:
        return self.blocks.shape[1]


@triton.jit(do_not_specialize=["layer", "num_rows"])
def convolve_columns(
    states, blocks, columns, weight, bias, out, runs,
    block_stride, head_stride, layer_stride, layer, num_rows, columns_stride, out_stride,
    TAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a run of one row: convolve its column after those that the state before has, and keep the last ones.

    runs: of `column_runs`. Programs (row, run, block of channels). Reference: `CausalConv.apply`.
    """
    row = tl.program_id(0)
    run = runs + tl.program_id(1) * 5
    head, place, first, size = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, WIDE)[None, :]
    is_channel = channel < size
    before, after = tl.load(blocks + row), tl.load(blocks + num_rows + row)
    from_head = head * head_stride + layer.to(tl.int64) * layer_stride + place
    kept = from_head + channel[:, None] * (TAPS - 1) + tap
    is_kept = is_channel[:, None] & (tap < TAPS - 1)
    known = tl.load(states + before * block_stride + kept, mask=is_kept & (before >= 0), other=0.0)
    given = tl.load(columns + row.to(tl.int64) * columns_stride + first + channel, mask=is_channel, other=0.0).to(
        tl.float32
    )
    # state before may be the one after, and its columns move from thread to thread
    tl.debug_barrier()
    to = states + after * block_stride + kept - 1
    tl.store(to, known, mask=is_kept & (tap > 0) & (after >= 0))
    last = states + after * block_stride + from_head + channel * (TAPS - 1) + TAPS - 2
    tl.store(last, given, mask=is_channel & (after >= 0))
    if tl.load(run + 4) == 1:
        numbers = first + channel
        at = weight + numbers[:, None] * TAPS + tap
        factors = tl.load(at, mask=is_channel[:, None] & (tap < TAPS), other=0.0).to(tl.float32)
        values = tl.where(tap == TAPS - 1, given[:, None], known)
        sums = tl.sum(factors * values, 1)
        if HAS_BIAS:
            sums += tl.load(bias + numbers, mask=is_channel, other=0.0).to(tl.float32)
        if SILU:
            sums = sums.to(out.dtype.element_ty).to(tl.float32)
            sums = sums / (1.0 + tl.exp(-sums))
        sums = tl.where(after >= 0, sums, 0.0)
        tl.store(out + row.to(tl.int64) * out_stride + numbers, sums.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["layer", "num_rows"])
def delta_step(
    states, blocks, query, key, value, decay, beta, out,
    block_stride, head_stride, layer_stride, layer, num_rows, first,
    query_row, query_matrix, key_row, key_matrix, value_row, value_matrix, decay_row, decay_matrix, beta_row, beta_matrix,
    PER_HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    DECAY_BY_ROW: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of a matrix of one row. Programs (row, matrix, block of columns). Reference: `delta_rule.delta_step`."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.arange(0, BLOCK_R)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    before, after = tl.load(blocks + row), tl.load(blocks + num_rows + row)
    numbers = (matrix // PER_HEAD) * head_stride + layer.to(tl.int64) * layer_stride + first
    numbers = numbers + (matrix % PER_HEAD) * ROWS * COLUMNS + r[:, None] * COLUMNS + c[None, :]
    state = tl.load(states + before * block_stride + numbers, mask=here & (before >= 0), other=0.0)
    k = tl.load(key + row * key_row + matrix * key_matrix + r, mask=r < ROWS, other=0.0)
    q = tl.load(query + row * query_row + matrix * query_matrix + r, mask=r < ROWS, other=0.0)
    v = tl.load(value + row * value_row + matrix * value_matrix + c, mask=c < COLUMNS, other=0.0)
    decays = decay + row * decay_row + matrix * decay_matrix
    if DECAY_BY_ROW:
        state = state * tl.exp(tl.load(decays + r, mask=r < ROWS, other=0.0))[:, None]
    else:
        state = state * tl.exp(tl.load(decays))
    update = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + row * beta_row + matrix * beta_matrix)
    state += k[:, None] * update[None, :]
    tl.store(states + after * block_stride + numbers, state, mask=here & (after >= 0))
    found = tl.where(after >= 0, tl.sum(state * q[:, None], 0), 0.0)
    tl.store(out + (row * tl.num_programs(1) + matrix) * COLUMNS + c, found, mask=c < COLUMNS)


@triton.jit(do_not_specialize=["layer", "num_rows"])
def scan_step(
    states, blocks, x, b, c, decay, out,
    block_stride, head_stride, layer_stride, layer, num_rows, first,
    x_row, x_matrix, b_row, b_matrix, c_row, c_matrix, decay_row, decay_matrix,
    PER_HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of a matrix of one row. Programs (row, matrix, block of rows). Reference: `selective_scan.scan_step`."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK_C)
    here = (r < ROWS)[:, None] & (n < COLUMNS)[None, :]
    before, after = tl.load(blocks + row), tl.load(blocks + num_rows + row)
    numbers = (matrix // PER_HEAD) * head_stride + layer.to(tl.int64) * layer_stride + first
    numbers = numbers + (matrix % PER_HEAD) * ROWS * COLUMNS + r[:, None] * COLUMNS + n[None, :]
    state = tl.load(states + before * block_stride + numbers, mask=here & (before >= 0), other=0.0)
    own = tl.load(x + row * x_row + matrix * x_matrix + r, mask=r < ROWS, other=0.0)
    added = tl.load(b + row * b_row + matrix * b_matrix + n, mask=n < COLUMNS, other=0.0)
    read = tl.load(c + row * c_row + matrix * c_matrix + n, mask=n < COLUMNS, other=0.0)
    state = state * tl.exp(tl.load(decay + row * decay_row + matrix * decay_matrix)) + own[:, None] * added[None, :]
    tl.store(states + after * block_stride + numbers, state, mask=here & (after >= 0))
    found = tl.where(after >= 0, tl.sum(state * read[None, :], 1), 0.0)
    tl.store(out + (row * tl.num_programs(1) + matrix) * ROWS + r, found, mask=r < ROWS)


def convolve_rows(
    rows: RowStates, conv: CausalConv, runs: Tensor, columns: Tensor, out: Tensor, configs: LaunchConfigs
) -> None:
    """One launch. runs: of `column_runs`, int64 on the device; columns and out `[>= rows, C]`, rows may be strided."""
    strides, taps = rows.states.stride(), conv.weight.shape[1]
    most = max(part.num_channels for part in conv.parts)
    block = min(configs.conv_channels, triton.next_power_of_2(most))
    convolve_columns[(rows.num_rows, len(runs), triton.cdiv(most, block))](
        rows.states, rows.blocks, columns, conv.weight, conv.weight if conv.bias is None else conv.bias, out, runs,
        *strides[:3], rows.layer, rows.num_rows, columns.stride(0), out.stride(0),
        TAPS=taps, WIDE=triton.next_power_of_2(taps), BLOCK=block, HAS_BIAS=conv.bias is not None, SILU=conv.has_silu,
        num_warps=configs.conv_warps, enable_fp_fusion=True,
    )  # fmt: skip


def delta_rows(
    rows: RowStates, tokens: Sequence[Tensor], first: int, shape: tuple[int, int], out: Tensor, configs: LaunchConfigs
) -> None:
    """One launch. tokens: of `DELTA_RULE`, `[>= rows, M, ...]`; first, shape: see `StatePlan.recur`; out: contiguous."""
    num_matrices, high = out.shape[1], triton.next_power_of_2(shape[0])
    wide = min(triton.next_power_of_2(shape[1]), max(1, configs.state_numbers // high))
    delta_step[(rows.num_rows, num_matrices, triton.cdiv(shape[1], wide))](
        rows.states, rows.blocks, *tokens, out,
        *rows.states.stride()[:3], rows.layer, rows.num_rows, first, *_strides(tokens),
        PER_HEAD=num_matrices // rows.states.shape[1], ROWS=shape[0], COLUMNS=shape[1], BLOCK_R=high, BLOCK_C=wide,
        DECAY_BY_ROW=num_decays(tokens) > 1,
        num_warps=configs.state_warps, enable_fp_fusion=True,
    )  # fmt: skip


def scan_rows(
    rows: RowStates, tokens: Sequence[Tensor], first: int, shape: tuple[int, int], out: Tensor, configs: LaunchConfigs
) -> None:
    """One launch. tokens: of `SELECTIVE_SCAN`; other arguments as of `delta_rows`."""
    num_matrices, wide = out.shape[1], triton.next_power_of_2(shape[1])
    high = min(triton.next_power_of_2(shape[0]), max(1, configs.state_numbers // wide))
    scan_step[(rows.num_rows, num_matrices, triton.cdiv(shape[0], high))](
        rows.states, rows.blocks, *tokens, out,
        *rows.states.stride()[:3], rows.layer, rows.num_rows, first, *_strides(tokens),
        PER_HEAD=num_matrices // rows.states.shape[1], ROWS=shape[0], COLUMNS=shape[1], BLOCK_R=high, BLOCK_C=wide,
        num_warps=configs.state_warps, enable_fp_fusion=True,
    )  # fmt: skip


def _strides(tokens: Sequence[Tensor]) -> list[int]:
    return [stride for each in tokens for stride in each.stride()[:2]]
