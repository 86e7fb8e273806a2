"""Linear layers: oneDNN's packed weights on a processor where they pay, plain torch elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.int8_linear import Int8Linear, Int8Matrix, Matrix

_PACKED_FLOAT32_NUMEL = 1 << 20
"""Number of float32 weights below which a layer fits a core's cache, and packing only adds its fixed cost per call."""


class Linear(Protocol):
    """`y = x weight^T + bias`; weight `[out, in]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`: `[T, out]`, `[T, in]` -> `[T, out]`; the residual may be overwritten."""
        ...


class PlainLinear:
    """Any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._bias is not None:
            residual = residual.add_(self._bias)
        return residual.addmm_(x, self._transposed)


class PackedLinear:
    """A weight in the layout of oneDNN's matrix product, for any number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias
        # Calling the overload directly skips overload resolution, which costs as much as a small product.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_with = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._multiply_with(x, residual, self._packed, self._bias, "add")
        return y


def make_linear(weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The fastest layer for this weight; a packed one keeps no reference to it."""
    if isinstance(weight, Int8Matrix):
        return Int8Linear(weight, bias)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"weight {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)}")
    if weight.is_cpu and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        if weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return PackedLinear(weight, bias)
        if weight.dtype is torch.float32 and weight.numel() >= _PACKED_FLOAT32_NUMEL:
            return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of gate_up `[T, 2 * I]`, in place -> a view `[T, I]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate, inplace=True).mul_(up)
