"""One transformer block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention_backend import AttentionPlan
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.rms_norm import RmsNorm
from pdserve.models.layers.self_attention import SelfAttention


class FeedForward(Protocol):
    """A layer that computes each token independently: `GatedMlp` or `SparseMlp`."""

    def add_norm(self, residual: Tensor, x: Tensor, norm: RmsNorm, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`s = residual + self(x)` -> s and `norm(s)`; all `[T, H]`. The residual may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each added to the residual stream after a norm of its own.

    Each addition is computed together with the norm that follows it, which after the MLP belongs to the next layer.
    """

    input_norm: RmsNorm
    attention: SelfAttention
    mlp_norm: RmsNorm
    mlp: FeedForward

    def forward(
        self, residual: Tensor, x: Tensor, next_norm: RmsNorm, phases: Tensor, plan: AttentionPlan, ops: LayerOps
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after this layer, and its `next_norm`.

        residual `[T, H]`, may be overwritten; x `[T, H]`: `input_norm(residual)`; phases `[T, 1, D / 2]`; plan: the step's plan for
        `attention.spec` -> `[T, H]` twice.
        """
        residual, x = self.attention.add_norm(residual, x, self.mlp_norm, phases, plan, ops)
        return self.mlp.add_norm(residual, x, next_norm, ops)
