"""One transformer block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention_backend import AttentionPlan
from pdserve.kernels.rms_norm import RmsNorm
from pdserve.models.layers.self_attention import SelfAttention


class FeedForward(Protocol):
    """A layer that computes each token independently: `GatedMlp` or `SparseMlp`."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, both `[T, H]`. The residual may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each added to the residual stream after a norm of its own."""

    input_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: FeedForward

    def forward(self, x: Tensor, phases: Tensor, plan: AttentionPlan) -> Tensor:
        """x `[T, H]`, which may be overwritten, phases `[T, 1, D / 2]` -> `[T, H]`. plan: the step's plan for `attention.spec`."""
        x = self.attention.add_to(x, self.input_norm(x), phases, plan)
        return self.mlp.add_to(x, self.mlp_norm(x))
