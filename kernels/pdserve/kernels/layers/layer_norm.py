"""Layer normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class LayerNorm:
    """`y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        """weight and bias `[H]`."""
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """`[*, H]` -> `[*, H]`."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)
