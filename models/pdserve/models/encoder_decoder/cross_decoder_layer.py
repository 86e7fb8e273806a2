"""`CrossDecoderLayer`: a decoder's layer that attends to its own sequence, then to the encoder's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.cpu.linear import Linear
from pdserve.models.encoder_decoder.residual_norm import ResidualNorm
from pdserve.models.encoder_decoder_step import DecoderTokens, EncoderTokens


@dataclass(frozen=True, slots=True)
class CrossDecoderLayer:
    """Self attention, cross attention and MLP."""

    index: int
    """The layer's index in the KV cache."""
    num_heads: int
    head_dim: int
    qkv: Linear
    """Queries, keys and values of the self attention, side by side."""
    self_output: Linear
    self_norm: ResidualNorm
    cross_q: Linear
    cross_kv: Linear
    """Keys and values of the encoder's output, side by side."""
    cross_output: Linear
    cross_norm: ResidualNorm
    mlp: Callable[[Tensor], Tensor]
    mlp_norm: ResidualNorm

    def store_encoded(self, hidden: Tensor, tokens: EncoderTokens) -> None:
        """Write keys and values of the encoder's output `[Te, H]`, and zeros into the slots after each prompt."""
        kv = self.cross_kv(hidden).view(len(hidden), 2 * self.num_heads, self.head_dim)
        if tokens.num_slots > len(hidden):
            # a block's bytes have a digest, so none may be an earlier owner's
            kv = kv.new_zeros(tokens.num_slots, *kv.shape[1:]).index_copy_(0, tokens.places, kv)
        tokens.plan.store(self.index, kv[:, : self.num_heads], kv[:, self.num_heads :])

    def forward(self, x: Tensor, tokens: DecoderTokens, distance_bias: Tensor | None) -> Tensor:
        """x `[Td, H]`; distance_bias: of the self attention, see `AttentionPlan.attend` -> `[Td, H]`."""
        x = self.self_norm(x, lambda normed: self._attend_self(normed, tokens, distance_bias))
        x = self.cross_norm(x, lambda normed: self._attend_cross(normed, tokens))
        return self.mlp_norm(x, self.mlp)

    def _attend_self(self, x: Tensor, tokens: DecoderTokens, distance_bias: Tensor | None) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3 * self.num_heads, self.head_dim)
        q, k, v = (qkv[:, start : start + self.num_heads] for start in (0, self.num_heads, 2 * self.num_heads))
        plan = tokens.self_plan
        plan.store(self.index, k, v)
        if distance_bias is None:
            return self.self_output(plan.attend(self.index, q, k, v))
        return self.self_output(plan.attend(self.index, q, k, v, distance_bias=distance_bias))

    def _attend_cross(self, x: Tensor, tokens: DecoderTokens) -> Tensor:
        q = self.cross_q(x).view(len(x), self.num_heads, self.head_dim)
        # the plan reads the encoder's keys and values in the pages
        return self.cross_output(tokens.cross_plan.attend(self.index, q, q, q))
