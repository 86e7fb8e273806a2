"""Products with a bfloat16 matrix in C++ (`bfloat_rows.h`), which reads oneDNN's packed weight in place, or `in_blocks`' copy.

A block of the weight is prefetched, and multiplied by all rows while it is in a cache; sums are float32 and are rounded once, to
bfloat16, or not at all. A row has the same bits whatever is next to it, with any number of threads.
"""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.native.native_library import BfloatCall, BfloatMatrix, NativeLibrary
from pdserve.kernels.native.native_rows import NativeRows

TILES_LEVEL, PAIRS_LEVEL = "amx_bf16", "avx512_bf16"
"""The levels that multiply tiles of bfloat16 numbers, and pairs of them, in one instruction."""
CHANNELS = 64
"""Output channels of a block."""
_PAIR = 2
"""Inputs side by side."""
_SAMPLES, _DIFFERENT = 4096, 64
"""Numbers of a weight that are compared with oneDNN's bytes, and how many of them must differ for that to say anything."""


def has_pairs(weight: Tensor) -> bool:
    """True if the weight `[out, in]` can lie in blocks."""
    return weight.shape[1] > 0 and weight.shape[1] % _PAIR == 0


def in_blocks(weight: Tensor) -> Tensor:
    """A copy of a bfloat16 weight `[out, in]` that `has_pairs`, as C++ reads it: `[blocks, in / 2, CHANNELS, 2]`, with zeros
    after the last output.
    """
    num_outputs, num_inputs = weight.shape
    num_blocks = -(-num_outputs // CHANNELS)
    blocks = weight.new_zeros((num_blocks, num_inputs // _PAIR, CHANNELS, _PAIR))
    for block, first in zip(blocks, range(0, num_outputs, CHANNELS), strict=True):
        part = weight[first : first + CHANNELS]
        block[:, : len(part)] = part.view(len(part), -1, _PAIR).transpose(0, 1)
    return blocks


def packed_inputs(packed: Tensor, weight: Tensor) -> int | None:
    """Inputs of oneDNN's packed weight, with padding, if it lies as `BfloatMatrix` says; None if it lies in another way.

    oneDNN chooses layouts by shape and processor, and documents none: numbers at random places are compared. packed: of
    `_reorder_linear_weight` for weight `[out, in]` in bfloat16.
    """
    num_outputs, num_inputs = weight.shape
    if num_inputs % _PAIR or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    num_blocks = -(-num_outputs // CHANNELS)
    padded, rest = divmod(int(torch.ops.mkldnn._nbytes(packed)), 2 * num_blocks * CHANNELS)
    if rest or padded % _PAIR or padded < num_inputs:
        return None
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randint(num_outputs, (_SAMPLES,), generator=generator)
    inputs = torch.randint(num_inputs, (_SAMPLES,), generator=generator)
    expected = weight[outputs, inputs]
    if len(torch.unique(expected)) < _DIFFERENT:
        return None
    places = outputs // CHANNELS * padded * CHANNELS + outputs % CHANNELS * _PAIR
    places += inputs // _PAIR * CHANNELS * _PAIR + inputs % _PAIR
    size = num_blocks * CHANNELS * padded
    held = (ctypes.c_int16 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.frombuffer(held, dtype=torch.bfloat16)[places]
    return padded if torch.equal(found, expected) else None


class NativeBfloatRows(NativeRows):
    """`x W^T + bias` over a weight that oneDNN packed, or one of `in_blocks`."""

    def __init__(
        self,
        packed: Tensor,
        padded: int,
        weight: Tensor,
        bias: Tensor | None,
        library: NativeLibrary,
        level: str | None = None,
    ) -> None:
        """padded: of `packed_inputs`; inputs of `in_blocks`. weight: `[out, in]`, not kept.

        level: one of `library.levels`; default: the fastest.
        """
        super().__init__(len(weight))
        # held here, since the call has only addresses
        self._packed = packed
        self._bias = None if bias is None else bias.float().contiguous()
        self._num_inputs = weight.shape[1]
        self._level = 0 if level is None else library.levels.index(level)
        self._multiply = library.multiply_bfloats
        values = torch.ops.mkldnn.data_ptr(packed) if packed.is_mkldnn else packed.data_ptr()
        self.matrix = BfloatMatrix(
            values=values, bias=None if self._bias is None else self._bias.data_ptr(),
            num_inputs=self._num_inputs, num_outputs=self._num_outputs, padded=padded,
        )  # fmt: skip
        """The weight for C++; its addresses are valid as long as this object."""
        self._constants = BfloatCall(matrix=self.matrix, parallel=library.parallel)

    def in_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]` float32: the sums before they are rounded."""
        out = torch.empty(len(x), self._num_outputs, dtype=torch.float32)
        self._run(x, out, 0)
        return out

    def _run(self, x: Tensor, out: Tensor, adds: int) -> None:
        if x.shape[1] != self._num_inputs or out.shape != (len(x), self._num_outputs):
            raise ValueError(
                f"{tuple(x.shape)} -> {tuple(out.shape)} of a weight {self._num_outputs, self._num_inputs}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        call = BfloatCall.from_buffer_copy(self._constants)
        call.x, call.x_stride, call.num_rows = x.data_ptr(), x.stride(0), len(x)
        if out.dtype is torch.float32:
            call.float_out = out.data_ptr()
        else:
            call.out = out.data_ptr()
        call.out_stride, call.adds = out.stride(0), adds
        call.num_threads = torch.get_num_threads()
        self._multiply(byref(call), self._level)
