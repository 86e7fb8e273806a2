"""`TokenInputs`: vectors that layers of Gemma 4 read of a token's id and embedding; `TokenInput`: what a layer makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layers.rms_norm import RmsNorm


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """`(norm(scale * projection(embedding)) + table(id)) * factor` for each layer, P numbers each."""

    table: Callable[[Tensor], Tensor]
    """`[T]` int64 -> `[T, L * P]`, scaled."""
    projection: Linear
    """`[T, H]` -> `[T, L * P]`."""
    projection_scale: float
    norm: RmsNorm
    """Over the P numbers of a layer."""
    num_layers: int
    factor: float

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """`[T]` int64 and `[T, H]` -> `[L, T, P]`."""
        shape = (len(token_ids), self.num_layers, -1)
        projected = self.norm((self.projection(embedded) * self.projection_scale).view(shape))
        return ((projected + self.table(token_ids).view(shape)) * self.factor).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class TokenInput:
    """One layer's part: `norm(projection(gelu(gate(x)) * input))`."""

    gate: Linear
    """`[T, H]` -> `[T, P]`."""
    projection: Linear
    """`[T, P]` -> `[T, H]`."""
    norm: RmsNorm

    def __call__(self, x: Tensor, of_layer: Tensor) -> Tensor:
        """`[T, H]` and `[T, P]` -> `[T, H]`."""
        gated = F.gelu(self.gate(x), approximate="tanh").mul_(of_layer)
        return self.norm(self.projection(gated))
