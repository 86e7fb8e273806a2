"""Linear layers with int8 weights, on a CPU: one scale per output channel, and one per row of the input.

    q_x = round(x / s_x),  s_x = max |x| / 127 of the row;   y = (q_x q_w^T) * s_w * s_x + bias

Products and sums of int8 numbers are exact in int32, and a row's scale depends only on that row: a row of y has the same bits
whatever the other rows are, in any number of them. Dynamic quantization of activations per row is that of compressed-tensors
(`input_activations` with strategy `token`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pdserve.kernels.native.native_int8 import BlockedValues, NativeInt8Rows
from pdserve.kernels.native.native_library import NATIVE_DTYPES, built_library

LARGEST = 127
"""-128 is not used, so that ranges are symmetric."""
_ZERO = 128
"""The number for 0 in a row of the input: oneDNN's fast kernels take its first operand unsigned."""
_SMALLEST_RANGE = 1e-30
"""A row of zeros has this range, so that nothing is divided by 0."""
_EXACT_PRODUCTS = 1024
"""Number of products of int8 numbers whose sum is at most 2^24."""
_NATIVE_ROWS = 8
"""Number of rows up to which C++ computes although oneDNN has AMX: the weights' bytes decide there. Not measured."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A weight `[out, in]`, `values * scales[:, None]`."""

    values: Tensor
    """int8 `[out, in]`."""
    scales: Tensor
    """float32 `[out]`, positive."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @classmethod
    def stacked(cls, matrices: Sequence[Int8Matrix]) -> Int8Matrix:
        values, scales = zip(*((matrix.values, matrix.scales) for matrix in matrices), strict=True)
        return cls(torch.cat(values), torch.cat(scales))

    def with_rows(self, arranged: Callable[[Tensor], Tensor]) -> Int8Matrix:
        """See `matrices.with_rows`."""
        return Int8Matrix(arranged(self.values), arranged(self.scales))

    @classmethod
    def quantized(cls, weight: Tensor) -> Int8Matrix:
        """Round a weight `[out, in]` to the nearest multiples of each row's `max |w| / 127`."""
        wide = weight.float()
        scales = wide.abs().amax(1).clamp_min_(_SMALLEST_RANGE).div_(LARGEST)
        return cls((wide / scales[:, None]).round_().to(torch.int8), scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[T, in]` -> uint8 `[T, in]`, 128 for 0, and float32 scales `[T, 1]`, not finite if a number of the row is not."""
    ranges = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32).clamp_min_(_SMALLEST_RANGE)
    # cut, not rounded: half is added to numbers that are positive then
    values = x.mul(ranges.reciprocal().mul_(LARGEST)).add_(_ZERO + 0.5).to(torch.uint8)
    return values, ranges.div_(LARGEST)


class Int8Linear:
    """A `Linear` over an `Int8Matrix`, in a layout for the CPU where there is a fast one. One copy is kept.

    C++ computes where it is built. With AMX, which it does not use, oneDNN computes more than `_NATIVE_ROWS` rows, and both read
    oneDNN's layout. Without C++ oneDNN computes where its kernels are exact and fast, else torch. All have the same bits.
    """

    def __init__(self, matrix: Int8Matrix, bias: Tensor | None) -> None:
        self._scales = matrix.scales
        self._bias = bias
        self._values: Tensor | None = matrix.values
        self._native: NativeInt8Rows | None = None
        self._native_rows = _NATIVE_ROWS
        if not matrix.values.is_cpu:
            return
        library, blocks = built_library(), None
        if has_fast_int8() and (library is None or has_amx()):
            self._packed: Tensor = torch.ops.onednn.qlinear_prepack(matrix.values, None)
            self._zeros = torch.zeros(len(matrix.scales), dtype=torch.int64)
            self._values = None
            if library is not None:
                blocks = BlockedValues.of_onednn(self._packed, matrix.values.shape)
        elif library is not None:
            blocks = BlockedValues.of_tensor(matrix.values)
            self._values = None
            self._native_rows = sys.maxsize
        if library is not None and blocks is not None:
            self._native = NativeInt8Rows(blocks, matrix.values, matrix.scales, bias, library)

    def __call__(self, x: Tensor) -> Tensor:
        if self._native is not None and len(x) <= self._native_rows:
            if x.dtype in NATIVE_DTYPES:
                return self._native(x)
            return self._native(x.float()).to(x.dtype)
        values, scales = quantize_rows(x)
        y = self._product(values).mul_(scales)
        if self._bias is not None:
            y += self._bias
        return y.to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if (
            self._native is not None
            and len(x) <= self._native_rows
            and x.dtype in NATIVE_DTYPES
            and residual.dtype is x.dtype
            and residual.stride(1) == 1
        ):
            return self._native.add_to(residual, x)
        return residual.add_(self(x))

    def _product(self, rows: Tensor) -> Tensor:
        """rows: uint8 `[T, in]` -> float32 `[T, out]`, scaled per channel."""
        if self._values is None:
            y: Tensor = torch.ops.onednn.qlinear_pointwise(
                rows, 1.0, _ZERO, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], "",
            )  # fmt: skip
            return y
        signed = rows.view(torch.int8).bitwise_xor(-_ZERO)
        if has_exact_int_mm():
            return torch._int_mm(signed, self._values.t()).float().mul_(self._scales)
        return sums_in_pieces(signed, self._values).float().mul_(self._scales)


def sums_in_pieces(rows: Tensor, values: Tensor) -> Tensor:
    """int8 `[T, in]` and `[out, in]` -> int32 `[T, out]`: sums of `_EXACT_PRODUCTS` in float32, which are exact."""
    sums = torch.zeros(len(rows), len(values), dtype=torch.int32)
    for start in range(0, rows.shape[1], _EXACT_PRODUCTS):
        piece = slice(start, start + _EXACT_PRODUCTS)
        sums += (rows[:, piece].float() @ values[:, piece].t().float()).to(torch.int32)
    return sums


@cache
def has_exact_int_mm() -> bool:
    """True if torch's products of int8 matrices are exact here: oneDNN's for AVX2 saturate at 16 bits on the way."""
    ends = torch.tensor([127, -127, -128], dtype=torch.int8).repeat_interleave(11)
    rows, columns = ends[:, None].expand(33, 64).contiguous(), ends[:, None].expand(33, 64).contiguous().t()
    expected = 64 * ends.int()[:, None] * ends.int()
    return all(torch.equal(torch._int_mm(rows[::step], columns), expected[::step]) for step in (1, 11))


def has_amx() -> bool:
    """True if this CPU multiplies int8 tiles, and this process may use them."""
    is_there: bool = torch.cpu._is_amx_tile_supported()
    return is_there


@cache
def has_fast_int8() -> bool:
    """True if oneDNN multiplies int8 numbers into int32 here without saturation on the way, as VNNI does."""
    is_there = torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()  # type: ignore[no-untyped-call]
    # the variable ONEDNN_MAX_CPU_ISA may withhold it
    return is_there and has_exact_int_mm()
