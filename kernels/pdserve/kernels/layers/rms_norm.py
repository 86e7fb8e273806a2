"""Root mean square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32.

    `F.rms_norm` is composed of many small operations on a CPU. `cat(x, -x)` has mean 0 and the variance
    `mean(x^2)`, so the first half of its layer norm is the same number, by one fused operation in a third of the time.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        if weight.dim() != 1:
            raise ValueError(f"the weight of a norm must be [H], not {tuple(weight.shape)}")
        self.weight = weight
        """`[H]`, in the dtype of the inputs or in float32."""
        self.eps = eps
        self._size = weight.shape[0]
        self._doubled = torch.cat((weight, weight))

    def __call__(self, x: Tensor) -> Tensor:
        """`[*, H]` -> `[*, H]`."""
        if not x.is_cpu:
            return F.rms_norm(x, (self._size,), self.weight, self.eps).to(x.dtype)
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, (2 * self._size,), self._doubled, None, self.eps)[..., : self._size]


class HeadNorm:
    """RMS normalisation per head, with one weight vector per head, in place: query heads and key heads in one pass."""

    def __init__(self, weights: Tensor, eps: float) -> None:
        """weights `[heads, D]`."""
        if weights.dim() != 2:
            raise ValueError(f"the weights of a head norm must be [heads, D], not {tuple(weights.shape)}")
        self.weights = weights
        """`[heads, D]`"""
        self.eps = eps
        self._unit = RmsNorm(torch.ones_like(weights[0]), eps)

    def __call__(self, x: Tensor) -> None:
        """x `[T, heads, D]`, overwritten."""
        torch.mul(self._unit(x), self.weights, out=x)


class ProjectionNorm:
    """RMS normalisation of all query heads together, and of all key heads together, in place."""

    def __init__(self, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
        """q_weight `[Hq * D]`, k_weight `[Hkv * D]`."""
        self._norms = (RmsNorm(q_weight, eps), RmsNorm(k_weight, eps))

    def __call__(self, qkv: Tensor) -> None:
        """qkv `[T, Hq + 2 * Hkv, D]`; queries and keys are overwritten."""
        start = 0
        for norm in self._norms:
            stop = start + norm.weight.shape[0] // qkv.shape[2]
            heads = qkv[:, start:stop]
            heads.copy_(norm(heads.flatten(1)).view(heads.shape))
            start = stop
