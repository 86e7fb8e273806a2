"""`NativeRows`: a product of few rows with a matrix in C++, as a `Linear`."""

from __future__ import annotations

import abc

import torch
from torch import Tensor


class NativeRows(abc.ABC):
    """Implements `Linear` by one method that writes or adds."""

    def __init__(self, num_outputs: int) -> None:
        self._num_outputs = num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]` in its dtype."""
        out = torch.empty(len(x), self._num_outputs, dtype=x.dtype)
        self._run(x, out, 0)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual `[T, out]` in the dtype of x, whose rows are contiguous; overwritten with the sum."""
        self._run(x, residual, 1)
        return residual

    @abc.abstractmethod
    def _run(self, x: Tensor, out: Tensor, adds: int) -> None:
        """Write the product into `out`; adds 1: add it to what `out` contains."""
