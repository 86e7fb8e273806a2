"""Activations of MLPs other than `LayerOps.swiglu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Gate = Callable[[Tensor], Tensor]
"""Gate and up side by side `[*, 2 * I]`, which may be overwritten -> `[*, I]`; of an MLP without a gate up `[*, I]`."""


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `[T, 2 * I]` -> `[T, I]`, with `gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def squared_relu(up: Tensor) -> Tensor:
    """`max(up, 0)^2` of `[*, I]`, which is overwritten: an MLP without a gate."""
    return up.relu_().square_()


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`g sigmoid(alpha g) (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """`[T, 2 * I]` -> `[T, I]`."""
        gate, up = gate_up.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        return gate.mul(torch.sigmoid(gate * self.alpha)).mul_(up.clamp(-self.limit, self.limit).add_(1))


class GatedActivation(NamedTuple):
    """Numbers of `g sigmoid(alpha g) (u + shift)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`, for kernels that
    contain the activation. Default: `silu(gate) * up`."""

    alpha: float = 1.0
    limit: float = torch.inf
    shift: float = 0.0
    is_gated: bool = True
    """False: `squared_relu`, which has none of these numbers."""

    @classmethod
    def of(cls, gate: Gate | None) -> GatedActivation | None:
        """gate: None: SiLU -> None for an activation of another form."""
        if gate is None:
            return cls()
        if gate is squared_relu:
            return cls(is_gated=False)
        return cls(gate.alpha, gate.limit, 1.0) if isinstance(gate, ClampedSwiglu) else None
