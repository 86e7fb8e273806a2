"""One transformer block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.attention_step import AttentionStep
from pdserve.kernels.linear import Linear, swiglu
from pdserve.kernels.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.rotary import rotate_heads


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and gated MLP, each added to the residual stream after a norm of its own."""

    index: int
    window: int | None
    num_rotated_heads: int
    """Hq + Hkv: queries and keys lie side by side, and are normalised and rotated together."""
    head_dim: int
    input_norm: RmsNorm
    qkv: Linear
    qk_norm: HeadNorm | None
    output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear

    def forward(self, x: Tensor, phases: Tensor, step: AttentionStep) -> Tensor:
        """x `[T, H]`, which may be overwritten, phases `[T, 1, D / 2]` -> `[T, H]`."""
        qkv = self.qkv(self.input_norm(x)).view(x.shape[0], -1, self.head_dim)
        qk = qkv[:, : self.num_rotated_heads]
        if self.qk_norm is not None:
            self.qk_norm(qk)
        rotate_heads(qk, phases)
        x = self.output.add_to(x, step.attend(self.index, qkv, self.window))
        return self.down.add_to(x, swiglu(self.gate_up(self.mlp_norm(x))))
