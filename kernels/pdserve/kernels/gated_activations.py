"""Activations of gated MLPs beside SiLU (`LayerOps.swiglu`)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `[T, 2 * I]` -> `[T, I]`, with `gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)
