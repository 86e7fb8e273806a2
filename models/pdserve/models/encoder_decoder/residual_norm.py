"""`ResidualNorm`: where a layer normalises the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.layers.layer_norm import LayerNorm
from pdserve.kernels.layers.rms_norm import RmsNorm

Norm = LayerNorm | RmsNorm


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """A norm, and its place before or after the addition."""

    norm: Norm
    is_first: bool
    """True: `x + f(norm(x))`; False: `norm(x + f(x))`."""

    def __call__(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """`[T, H]` -> `[T, H]`; function: the same shapes."""
        return x + function(self.norm(x)) if self.is_first else self.norm(x + function(x))
