"""Convolutions along sequences, whose last columns are in a pool of states."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.state.causal_conv import CausalConv
from pdserve.kernels.triton.launch_configs import LaunchConfigs
from pdserve.kernels.triton.pooled_states import PooledStates


@triton.jit
def finish(sums, bias, is_channel, out_type: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    """bias: of sums' channels, which is their last dimension."""
    if HAS_BIAS:
        sums += tl.load(bias, mask=is_channel, other=0.0).to(tl.float32)
    if SILU:
        sums = sums.to(out_type).to(tl.float32)
        sums = sums / (1.0 + tl.exp(-sums))
    return sums.to(out_type)


@triton.jit(do_not_specialize=["layer", "num_sequences"])
def keep_columns(
    states, blocks, starts, columns, weight, bias, out, runs,
    block_stride, head_stride, layer_stride, layer, num_sequences, columns_stride, out_stride,
    TAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a run at the last token of a sequence: convolve there, and keep the last columns.

    runs: of `column_runs`. Programs (sequence, run, block of channels). Reference: `CausalConv.apply`.
    """
    sequence = tl.program_id(0)
    run = runs + tl.program_id(1) * 5
    head, place, first_channel, size = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.arange(0, WIDE)[None, :]
    is_channel = channel < size
    before, after = tl.load(blocks + sequence), tl.load(blocks + num_sequences + sequence)
    first, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    row = stop - TAPS + tap
    is_given = (row >= first) & (tap < TAPS)
    given = tl.load(
        columns + row * columns_stride + (first_channel + channel)[:, None],
        mask=is_channel[:, None] & is_given,
        other=0.0,
    ).to(tl.float32)
    # of the columns before the sequence's first
    number = row - first + TAPS - 1
    kept = head * head_stride + layer.to(tl.int64) * layer_stride + place + channel[:, None] * (TAPS - 1)
    is_kept = is_channel[:, None] & (number >= 0) & (row < first) & (before >= 0)
    known = tl.load(states + before * block_stride + kept + number, mask=is_kept, other=0.0)
    values = tl.where(is_given, given, known)
    # state before may be the one after, and its columns move from thread to thread
    tl.debug_barrier()
    to = states + after * block_stride + kept + tap - 1
    tl.store(to, values, mask=is_channel[:, None] & (tap > 0) & (tap < TAPS) & (after >= 0))
    if tl.load(run + 4) == 1:
        numbers = first_channel + channel
        at = weight + numbers[:, None] * TAPS + tap
        factors = tl.load(at, mask=is_channel[:, None] & (tap < TAPS), other=0.0).to(tl.float32)
        sums = finish(tl.sum(factors * values, 1), bias + numbers, is_channel, out.dtype.element_ty, HAS_BIAS, SILU)
        tl.store(out + (stop - 1) * out_stride + numbers, sums, mask=is_channel & (first < stop))


@triton.jit(do_not_specialize=["layer", "num_decodes", "num_tiles"])
def convolve_tokens(
    states, blocks, starts, columns, weight, bias, out, runs,
    block_stride, head_stride, layer_stride, layer, num_decodes, num_tiles, columns_stride, out_stride,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of a run at BLOCK_T tokens of a chunk, but for its last token, where `keep_columns` convolves.

    Programs (chunk and tile of its tokens, run, block of channels); those of tiles that a chunk lacks end at once.
    """
    run = runs + tl.program_id(1) * 5
    sequence = num_decodes + tl.program_id(0) // num_tiles
    start = tl.program_id(0) % num_tiles * BLOCK_T
    first, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if (first + start < stop - 1) & (tl.load(run + 4) == 1):
        head, place, first_channel, size = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        is_channel = channel < size
        numbers = first_channel + channel
        token = start + tl.arange(0, BLOCK_T)[:, None]
        here = is_channel[None, :] & (first + token < stop - 1)
        before = tl.load(blocks + sequence)
        kept = states + before * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride + place
        kept += channel[None, :] * (TAPS - 1)
        sums = tl.zeros([BLOCK_T, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            # of the columns of the chunk; negative: of those before it
            number = token + tap - (TAPS - 1)
            given = columns + (first + number) * columns_stride + numbers[None, :]
            value = tl.load(given, mask=here & (number >= 0), other=0.0).to(tl.float32)
            known = tl.load(kept + token + tap, mask=here & (number < 0) & (before >= 0), other=0.0)
            factor = tl.load(weight + numbers * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
            sums += factor[None, :] * tl.where(number >= 0, value, known)
        found = finish(sums, bias + numbers[None, :], is_channel[None, :], out.dtype.element_ty, HAS_BIAS, SILU)
        tl.store(out + (first + token) * out_stride + numbers[None, :], found, mask=here)


def convolve(
    pooled: PooledStates, conv: CausalConv, runs: Tensor, columns: Tensor, out: Tensor, configs: LaunchConfigs
) -> None:
    """One launch, with chunks two. runs: of `column_runs`, int64 on the device; columns and out `[T, C]`, rows may be strided."""
    strides, taps = pooled.states.stride(), conv.weight.shape[1]
    most = max(part.num_channels for part in conv.parts)
    block = min(configs.conv_channels, triton.next_power_of_2(most))
    blocks = triton.cdiv(most, block)
    tensors = (
        pooled.states, pooled.blocks, pooled.starts, columns, conv.weight, conv.weight if conv.bias is None else conv.bias,
        out, runs,
    )  # fmt: skip
    # first, since it reads columns of states that `keep_columns` changes
    if tiles := triton.cdiv(pooled.longest - 1, configs.conv_tokens):
        convolve_tokens[(pooled.num_chunks * tiles, len(runs), blocks)](
            *tensors, *strides[:3], pooled.layer, pooled.num_decodes, tiles, columns.stride(0), out.stride(0),
            TAPS=taps, BLOCK=block, BLOCK_T=configs.conv_tokens, HAS_BIAS=conv.bias is not None, SILU=conv.has_silu,
            num_warps=configs.conv_warps, enable_fp_fusion=True,
        )  # fmt: skip
    keep_columns[(pooled.num_sequences, len(runs), blocks)](
        *tensors, *strides[:3], pooled.layer, pooled.num_sequences, columns.stride(0), out.stride(0),
        TAPS=taps, WIDE=triton.next_power_of_2(taps), BLOCK=block, HAS_BIAS=conv.bias is not None, SILU=conv.has_silu,
        num_warps=configs.conv_warps, enable_fp_fusion=True,
    )  # fmt: skip
