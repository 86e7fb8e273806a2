"""`Encoder`: whole prompts or sounds to hidden states; each token attends to all tokens of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear
from pdserve.models.encoder_decoder.residual_norm import Norm, ResidualNorm
from pdserve.models.encoder_decoder_step import EncoderTokens

PositionBias = Callable[[int], Tensor]
"""Number of tokens n -> `[Hq, n, n]`, added to the scores."""
EncoderEmbed = Callable[[Tensor, EncoderTokens], Tensor]
"""Token ids `[Te]` int64 -> `[Te, H]`, the input of the first layer."""


@dataclass(frozen=True, slots=True)
class PromptEmbed:
    """Embeds the tokens of prompts, each with its place in its prompt."""

    embed: Callable[[Tensor, Tensor], Tensor]
    """Token ids and positions `[T]` int64 -> `[T, H]`."""

    def __call__(self, token_ids: Tensor, tokens: EncoderTokens) -> Tensor:
        """As `EncoderEmbed`."""
        return self.embed(token_ids, torch.cat([torch.arange(n, device=token_ids.device) for n in tokens.lengths]))


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Attention and MLP."""

    qkv: Linear
    """Queries, keys and values side by side."""
    output: Linear
    attention_norm: ResidualNorm
    mlp: Callable[[Tensor], Tensor]
    mlp_norm: ResidualNorm
    num_heads: int
    head_dim: int
    scale: float
    """Factor of `q k^T`."""

    def forward(self, x: Tensor, lengths: Sequence[int], biases: Sequence[Tensor] | None) -> Tensor:
        """x `[T, H]`, prompts of `lengths` tokens; biases: `[Hq, n, n]` for each prompt -> `[T, H]`."""
        x = self.attention_norm(x, lambda normed: self._attend(normed, lengths, biases))
        return self.mlp_norm(x, self.mlp)

    def _attend(self, x: Tensor, lengths: Sequence[int], biases: Sequence[Tensor] | None) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        parts = []
        for place, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
            # each prompt by itself: the result does not depend on the others of the step
            q, k, v = qkv[:, :, end - length : end].unsqueeze(1)
            mask = None if biases is None else biases[place].unsqueeze(0)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
            parts.append(attended[0].transpose(0, 1).reshape(length, -1))
        return self.output(torch.cat(parts))


class Encoder:
    """Layers between an embedding and a norm."""

    def __init__(
        self,
        embed: EncoderEmbed,
        layers: Sequence[EncoderLayer],
        final_norm: Norm | None,
        position_bias: PositionBias | None = None,
    ) -> None:
        """final_norm: None: the last layer's output is normalised."""
        self._embed = embed
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._position_bias = position_bias

    def forward(
        self, token_ids: Tensor, tokens: EncoderTokens, before_layer: Callable[[], None] | None = None
    ) -> Tensor:
        """token_ids `[Te]` int64 -> `[Te, H]`. before_layer: as of `ModelInputs`."""
        lengths, x = tokens.lengths, self._embed(token_ids, tokens)
        biases = None
        if self._position_bias is not None:
            of_length = {length: self._position_bias(length) for length in dict.fromkeys(lengths)}
            biases = [of_length[length] for length in lengths]
        for layer in self._layers:
            if before_layer is not None:
                before_layer()
            x = layer.forward(x, lengths, biases)
        return x if self._final_norm is None else self._final_norm(x)
