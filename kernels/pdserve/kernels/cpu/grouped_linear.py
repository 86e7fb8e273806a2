"""Linear layers whose weights are integers of 4 or 8 bits in groups, on a CPU: w4a16 and w8a16.

    w = value * scale + offset    scale and offset of the group: some inputs of one output channel

A decode step reads each weight once, so its bits decide the time: C++ multiplies a few rows over the words in which the integers
are packed, and sums in float32. For more rows, parts of the weight are widened to the inputs' dtype and multiplied by torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.native.native_grouped import CHANNELS, NativeGroupedRows, in_blocks, in_words, places_of
from pdserve.kernels.native.native_library import NATIVE_DTYPES, built_library

_WIDENED_OUTPUTS = 512
"""Number of outputs whose weights are widened at once."""
_NATIVE_ROWS = 32
"""Number of rows up to which C++ computes."""


class GroupedLinear:
    """A `Linear` over a `GroupedMatrix`, of which it keeps packed words."""

    def __init__(self, matrix: GroupedMatrix, bias: Tensor | None) -> None:
        self._num_outputs, self._num_inputs = matrix.values.shape
        self._num_bits = matrix.num_bits
        self._words = in_words(matrix.values, matrix.num_bits)
        self._scales = in_blocks(matrix.scales)
        self._offsets = None if matrix.offsets is None else in_blocks(matrix.offsets)
        self._bias = bias
        library = built_library() if matrix.values.is_cpu else None
        self._native = None
        if library is not None:
            self._native = NativeGroupedRows(
                self._words, self._scales, self._offsets, bias, self._num_outputs, self._num_bits, library
            )

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_native(x):
            assert self._native is not None
            return self._native(x)
        y = x.new_empty((len(x), self._num_outputs))
        for outputs, part in self._parts(x.dtype):
            torch.mm(x, part, out=y[:, outputs])
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._is_native(x) and residual.dtype is x.dtype and residual.stride(1) == 1:
            assert self._native is not None
            return self._native.add_to(residual, x)
        return residual.add_(self(x))

    def in_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]` float32: the sums before they are rounded."""
        return self._native.in_float32(x) if self._native is not None and self._is_native(x) else self(x.float())

    def _is_native(self, x: Tensor) -> bool:
        return self._native is not None and len(x) <= _NATIVE_ROWS and x.dtype in NATIVE_DTYPES

    def _parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Outputs, and their weights `[in, outputs]`, valid until the next part is taken."""
        at_once = _WIDENED_OUTPUTS // CHANNELS
        is_native = self._native is not None and dtype in NATIVE_DTYPES
        room = torch.empty(self._num_inputs, _WIDENED_OUTPUTS, dtype=dtype) if is_native else None
        for first in range(0, len(self._words), at_once):
            outputs = slice(first * CHANNELS, min(self._num_outputs, first * CHANNELS + _WIDENED_OUTPUTS))
            if self._native is not None and room is not None:
                count = len(self._words[first : first + at_once])
                part = room.view(-1)[: self._num_inputs * count * CHANNELS].view(self._num_inputs, count * CHANNELS)
                self._native.widen(first, part)
            else:
                part = self._widened(slice(first, first + at_once)).to(dtype)
            yield outputs, part[:, : outputs.stop - outputs.start]

    def _widened(self, blocks: slice) -> Tensor:
        """float32 `[in, outputs]` of some blocks, in torch operations."""
        up = 32 - self._num_bits
        shifts = torch.tensor([up - self._num_bits * place for place in places_of(self._num_bits)], dtype=torch.int32)[
            :, None
        ]
        # [blocks, in / n, n, CHANNELS]
        values = ((self._words[blocks].unsqueeze(2) << shifts) >> up).flatten(1, 2).float()
        groups = values.view(len(values), self._scales.shape[1], -1, CHANNELS).mul_(self._scales[blocks].unsqueeze(2))
        if self._offsets is not None:
            groups += self._offsets[blocks].unsqueeze(2)
        return values.transpose(0, 1).flatten(1)
