"""Products of a few rows with an int8 matrix in C++ (`int8_rows.h`): each weight is read once, and everything else is fused.

Rounding the rows, scales, bias, the residual and the conversion to the output's dtype are the operations of `int8_linear.py`, in
their order: a row has the same bits as there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.native.native_library import NATIVE_DTYPES, Int8Call, NativeLibrary
from pdserve.kernels.native.native_rows import NativeRows

_ZERO = 128
_QUAD, _CHANNELS, _INPUT_UNIT = 4, 64, 64
"""Inputs side by side; channels of a block; inputs are padded to multiples of the last."""


class BlockedValues(NamedTuple):
    """An int8 matrix in the layout of `blocked`."""

    address: int
    padded: int
    """Inputs, with the zeros after them."""
    owner: object
    """Holds the memory."""

    @classmethod
    def of_tensor(cls, values: Tensor) -> BlockedValues:
        """Copy a matrix `[out, in]`."""
        found = blocked(values)
        return cls(found.data_ptr(), found.shape[1] * _QUAD, found)

    @classmethod
    def of_onednn(cls, packed: Tensor, shape: Sequence[int]) -> BlockedValues | None:
        """The result of `qlinear_prepack` for a matrix `[out, in]`, in place; None if oneDNN has another layout."""
        if not _is_onednn_blocked(*shape):
            return None
        return cls(torch.ops.mkldnn.data_ptr(packed), _padded(shape[1], _INPUT_UNIT), packed)


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def blocked(values: Tensor) -> Tensor:
    """`[out, in]` int8 -> `[blocks, padded / 4, 64, 4]`: 4 inputs of each of 64 channels side by side, zeros after the matrix."""
    num_outputs, num_inputs = values.shape
    whole = F.pad(values, (0, -num_inputs % _INPUT_UNIT, 0, -num_outputs % _CHANNELS)).contiguous()
    quads = whole.view(torch.int32).view(-1, _CHANNELS, whole.shape[1] // _QUAD)
    return quads.transpose(1, 2).contiguous().unsqueeze(-1).view(torch.int8)


@cache
def _is_onednn_blocked(num_outputs: int, num_inputs: int) -> bool:
    """Compare oneDNN's bytes of a random matrix with `blocked`: it chooses layouts by shape and processor, and documents none."""
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return False
    probe = torch.randint(
        -127, 128, (num_outputs, num_inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(0)
    )
    packed = torch.ops.onednn.qlinear_prepack(probe, None)
    expected = blocked(probe).flatten()
    if torch.ops.mkldnn._nbytes(packed) < len(expected):
        return False
    address = torch.ops.mkldnn.data_ptr(packed)
    found = torch.frombuffer((ctypes.c_int8 * len(expected)).from_address(address), dtype=torch.int8)
    return torch.equal(found, expected)


class NativeInt8Rows(NativeRows):
    """`x W^T * scales * x_scales + bias` over blocked values."""

    def __init__(
        self,
        values: BlockedValues,
        plain: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        library: NativeLibrary,
        level: str | None = None,
    ) -> None:
        """plain: the same values `[out, in]`; not kept. scales: float32 `[out]`. level: one of `library.int8_levels`; default: the
        fastest."""
        super().__init__(len(plain))
        # held here, since the call has only addresses
        self._values = values
        self._offsets = plain.sum(1, dtype=torch.int32).mul_(_ZERO)
        self._scales = scales.contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._num_inputs = plain.shape[1]
        self._level = 0 if level is None else library.int8_levels.index(level)
        self._multiply = library.multiply_rows
        self.constants = Int8Call(
            values=values.address, offsets=self._offsets.data_ptr(), scales=self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(), num_inputs=self._num_inputs,
            num_outputs=self._num_outputs, padded=values.padded, parallel=library.parallel,
        )  # fmt: skip
        """The fields of a call that do not change. Their addresses are valid as long as this object."""

    def _run(self, x: Tensor, out: Tensor, adds: int) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, padded = len(x), self._values.padded
        room = torch.empty(num_rows * (padded + 4), dtype=torch.uint8)
        call = Int8Call.from_buffer_copy(self.constants)
        call.dtype, call.x, call.num_rows, call.x_stride = NATIVE_DTYPES[x.dtype], x.data_ptr(), num_rows, x.stride(0)
        call.out, call.out_stride, call.adds = out.data_ptr(), out.stride(0), adds
        call.row_scales = room.data_ptr()
        call.rows = room.data_ptr() + 4 * num_rows
        call.num_threads = torch.get_num_threads()
        self._multiply(byref(call), self._level)
