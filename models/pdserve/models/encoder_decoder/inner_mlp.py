"""`InnerMlp`: the MLP of models with an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
}
"""Names in config.json."""


@dataclass(frozen=True, slots=True)
class InnerMlp:
    """`second(activation(first x))`; with a gate `second(activation(gate x) * up x)`."""

    first: Linear
    """`[T, H]` -> `[T, I]`, or with a gate `[T, 2 I]`: gate and up side by side."""
    second: Linear
    activation: Callable[[Tensor], Tensor]
    is_gated: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        inner = self.first(x)
        if not self.is_gated:
            return self.second(self.activation(inner))
        gate, up = inner.chunk(2, -1)
        return self.second(self.activation(gate) * up)
