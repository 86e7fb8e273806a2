"""Routers of mixtures: which experts a token has, and the weight of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.layers.experts import route_in_groups, route_top_k
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.weights.weight_loader import WeightLoader

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Hidden states `[T, H]` -> weights `[T, k]` in their dtype, experts `[T, k]` int64."""


@dataclass(frozen=True, slots=True)
class TopKRouter:
    """The `top_k` experts with the highest softmax probability."""

    logits: Linear
    """`[T, H]` -> `[T, E]`."""
    top_k: int
    normalise: bool
    """True: the weights of a token add up to 1."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return route_top_k(self.logits(x), self.top_k, normalise=self.normalise)


@dataclass(frozen=True, slots=True)
class GroupedRouter:
    """See `route_in_groups`; computed in float32."""

    logits: Linear
    """`[T, H]` float32 -> `[T, E]` float32."""
    top_k: int
    normalise: bool
    num_groups: int
    kept_groups: int
    scale: float
    """Factor of all weights."""
    bias: Tensor | None
    """`[E]` float32"""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = route_in_groups(
            self.logits(x.float()), self.top_k, num_groups=self.num_groups, kept_groups=self.kept_groups, bias=self.bias,
            normalise=self.normalise,
        )  # fmt: skip
        return weights.mul_(self.scale).to(x.dtype), experts


@dataclass(frozen=True, slots=True)
class BiasedRouter:
    """The `top_k` experts with the highest sum of softmax probability and bias, which is not in their weights; in float32."""

    logits: Linear
    """`[T, H]` float32 -> `[T, E]` float32."""
    top_k: int
    normalise: bool
    """True: the weights of a token add up to `scale`."""
    scale: float
    """Factor of all weights."""
    bias: Tensor
    """`[E]` float32"""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.logits(x.float()).softmax(-1)
        experts = (scores + self.bias).topk(self.top_k, -1).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights * self.scale).to(x.dtype), experts


@dataclass(frozen=True, slots=True)
class NormedRouter:
    """The `top_k` experts with the highest softmax probability of a normalised state. A token's weights, divided by their sum, are
    multiplied by a factor of each expert."""

    norm: RmsNorm
    logits: Linear
    """`[T, H]` -> `[T, E]`."""
    top_k: int
    factors: Tensor
    """`[E]` float32"""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.logits(self.norm(x)).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True) * self.factors[experts]
        return weights.to(x.dtype), experts


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """The `top_k` experts with the highest logits; the sigmoid of a logit is the expert's weight."""

    logits: Linear
    """`[T, H]` -> `[T, E]`."""
    top_k: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, experts = self.logits(x).topk(self.top_k, -1)
        return logits.float().sigmoid().to(x.dtype), experts


def load_router(
    weights: WeightLoader,
    prefix: str,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    normalise: bool,
    name: str = "gate",
) -> TopKRouter:
    """Read `{prefix}.{name}`, which is not quantized: which experts a token has is not left to rounding. Raises: ConfigError."""
    logits = make_linear(weights.tensor(f"{prefix}.{name}.weight", num_experts, hidden_size))
    return TopKRouter(logits, top_k, normalise)


def load_grouped_router(
    weights: WeightLoader,
    gate: str,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    *,
    bias: str | None,
    may_lack_bias: bool = False,
    normalise: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    kept_groups: int = 1,
) -> GroupedRouter:
    """Read `{gate}.weight` and the weight named `bias`, in float32.

    bias: None: scores are softmax probabilities. may_lack_bias: a checkpoint without it has zeros. Raises: ConfigError.
    """
    weight = weights.tensor(f"{gate}.weight", num_experts, hidden_size, dtype=torch.float32)
    added = None
    if bias is not None and may_lack_bias and weights.shape(bias) is None:
        added = torch.zeros(num_experts, device=weight.device)
    elif bias is not None:
        added = weights.tensor(bias, num_experts, dtype=torch.float32)
    return GroupedRouter(make_linear(weight), top_k, normalise, num_groups, kept_groups, scale, added)
