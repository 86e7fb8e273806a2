"""Products of a few rows with a matrix of grouped integers in C++ (`grouped_rows.h`): each weight is read once, in its few bits.

A row has the same bits whatever is next to it, with any number of threads.
"""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.native.native_library import NATIVE_DTYPES, GroupedCall, GroupedWeights, NativeLibrary
from pdserve.kernels.native.native_rows import NativeRows

CHANNELS = 64
"""Output channels of a block."""


def places_of(num_bits: int) -> tuple[int, ...]:
    """Place in a word of its inputs; with four bits pairs of inputs have the same place in both halves."""
    return (0, 4, 1, 5, 2, 6, 3, 7) if num_bits == 4 else (0, 1, 2, 3)


def in_words(values: Tensor, num_bits: int) -> Tensor:
    """int8 `[out, in]` -> int32 `[blocks, in / n, CHANNELS]`: n = 32 / num_bits inputs of a channel in the places of
    `places_of`; zeros after the last output. in: a multiple of n.
    """
    count = 32 // num_bits
    padded = F.pad(values, (0, 0, 0, -len(values) % CHANNELS)).view(-1, CHANNELS, values.shape[1] // count, count)
    words = torch.zeros(padded.shape[:3], dtype=torch.int32, device=values.device)
    for number, place in enumerate(places_of(num_bits)):
        bits = padded[..., number].int().bitwise_and_((1 << num_bits) - 1)
        words.bitwise_or_(bits.bitwise_left_shift_(num_bits * place))
    return words.transpose(1, 2).contiguous()


def in_blocks(numbers: Tensor) -> Tensor:
    """float32 `[out, groups]` -> `[blocks, groups, CHANNELS]`, zeros after the last output."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % CHANNELS))
    return padded.view(-1, CHANNELS, numbers.shape[1]).transpose(1, 2).contiguous()


class NativeGroupedRows(NativeRows):
    """`x W^T + bias`, weights `value * scale + offset`."""

    def __init__(
        self,
        words: Tensor,
        scales: Tensor,
        offsets: Tensor | None,
        bias: Tensor | None,
        num_outputs: int,
        num_bits: int,
        library: NativeLibrary,
        level: str | None = None,
    ) -> None:
        """words: of `in_words`. scales, offsets: of `in_blocks`. level: one of `library.levels`; default: the fastest."""
        super().__init__(num_outputs)
        # held here, since the call has only addresses
        self._held = words, scales, offsets
        self._bias = None if bias is None else bias.float().contiguous()
        self._num_groups = scales.shape[1]
        self._num_inputs = words.shape[1] * (32 // num_bits)
        self._level = 0 if level is None else library.levels.index(level)
        self._multiply = library.multiply_grouped
        self._widen = library.widen_grouped
        self._constants = GroupedCall(
            words=words.data_ptr(), scales=scales.data_ptr(), offsets=None if offsets is None else offsets.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(), bits=num_bits, num_inputs=self._num_inputs,
            num_outputs=num_outputs, group_size=self._num_inputs // self._num_groups, parallel=library.parallel,
        )  # fmt: skip

    def in_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]` float32: the sums before they are rounded."""
        out = torch.empty(len(x), self._num_outputs, dtype=torch.float32)
        self._run(x, out, 0)
        return out

    def widen(self, first: int, out: Tensor) -> None:
        """Write the weights of some blocks from `first` on. out: `[in, blocks * CHANNELS]`, contiguous."""
        call = GroupedCall.from_buffer_copy(self._constants)
        call.num_threads = torch.get_num_threads()
        weights = GroupedWeights(
            first_block=first, num_blocks=out.shape[1] // CHANNELS, out=out.data_ptr(), stride=out.stride(0),
            dtype=NATIVE_DTYPES[out.dtype],
        )  # fmt: skip
        self._widen(byref(call), byref(weights), self._level)

    def _run(self, x: Tensor, out: Tensor, adds: int) -> None:
        if x.shape[1] != self._num_inputs or out.shape != (len(x), self._num_outputs):
            raise ValueError(
                f"{tuple(x.shape)} -> {tuple(out.shape)} of a weight {self._num_outputs, self._num_inputs}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows = len(x)
        room = torch.empty(num_rows * (self._num_inputs + self._num_groups))
        call = GroupedCall.from_buffer_copy(self._constants)
        call.dtype, call.x, call.num_rows, call.x_stride = NATIVE_DTYPES[x.dtype], x.data_ptr(), num_rows, x.stride(0)
        if out.dtype is torch.float32:
            call.float_out = out.data_ptr()
        else:
            call.out = out.data_ptr()
        call.out_stride, call.adds = out.stride(0), adds
        call.rows = room.data_ptr()
        call.sums = room.data_ptr() + 4 * num_rows * self._num_inputs
        call.num_threads = torch.get_num_threads()
        self._multiply(byref(call), self._level)
