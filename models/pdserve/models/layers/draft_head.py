"""`DraftHead`: multi-token prediction, a layer after the last one that predicts one token more.

Entry i of its KV cache belongs to position i. It is made of the model's hidden state there and of the token at i + 1, and predicts
the token at i + 2. To draft further tokens, the head takes its own hidden state, and the token that it drafted.
Source: DeepSeek-V3 (DeepSeek-AI 2024), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerPlan
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.layers.decoder_layer import DecoderLayer


@dataclass(frozen=True, slots=True)
class DraftNames:
    """Names of a draft head's weights in the checkpoint."""

    prefix: str
    """Of all of them; `{}` is the number of the model's layers."""
    layer: str
    """Of the layer; empty: its weights have no more than the prefix."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    copies: tuple[str, ...] = ()
    """Weights that are those of the model, once more."""
    hidden_first: bool = False
    """True: the projection takes the hidden state before the embedding."""
    passes_normed: bool = False
    """True: the hidden state that the head takes of itself is the normed one."""

    def full(self, name: str, num_layers: int) -> str:
        """The name of a part, with the prefix."""
        prefix = self.prefix.format(num_layers)
        return f"{prefix}.{name}" if name else prefix


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The parts that the head has for itself; embedding and output head are the model's."""

    embedding_norm: RmsNorm
    hidden_norm: RmsNorm
    projection: Linear
    """`[T, 2 H]` -> `[T, H]`."""
    layer: DecoderLayer
    final_norm: RmsNorm
    hidden_first: bool
    passes_normed: bool

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        phases: Tensor,
        plan: LayerPlan,
        ops: LayerOps,
        output_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The normed hidden states `[N, H]`, from which logits are made, and those that a further entry takes.

        embeddings `[T, H]`: of the tokens after the entries' positions. hidden `[T, H]`: the model's at these positions, or the
        head's own. phases, plan, output_rows: as of `DecoderLayer.forward`.
        """
        parts = (self.embedding_norm(embeddings), self.hidden_norm(hidden))
        stream = self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        norm = self.layer.input_norm
        x = stream if norm is None else norm(stream)
        if output_rows is not None and not len(output_rows):
            self.layer.store(x, phases, plan, ops)
            return x[:0], x[:0]
        residual, normed, _ = self.layer.forward(stream, x, self.final_norm, phases, plan, ops, output_rows)
        return normed, normed if self.passes_normed else residual
