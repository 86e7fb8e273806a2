"""Draft heads: a layer after the last one that predicts one token more.

Entry i of its KV cache belongs to position i. It is made of what the model computed there and of the token at i + 1, and predicts
the token at i + 2. To draft further tokens, the head takes its own hidden state, and the token that it drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, OutputHead
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerPlan
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.embedding import Embedding


@dataclass(frozen=True, slots=True)
class DraftNames:
    """Names of the weights of a model's own head in the checkpoint."""

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
class DraftHead(ABC):
    """What all heads have."""

    layer: DecoderLayer
    final_norm: RmsNorm
    embedding_norm: RmsNorm
    hidden_norm: RmsNorm

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers of the model whose inputs `taken` needs."""
        return ()

    @property
    def own_embedding(self) -> Embedding | None:
        """In place of the model's; None: there is none."""
        return None

    def own_logits(self, normed: Tensor) -> Tensor | None:
        """`[N, H]` -> `[N, V]` float32, in place of those of the model's output head; None: there are none."""
        return None

    @abstractmethod
    def taken(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """What entries take of the model, `[T, H]`. hidden `[T, H]`: its last hidden states. inputs `[T, H]` each: of
        `tapped_layers`."""

    @abstractmethod
    def inputs_of(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream `[T, H]`, and the input of the layer's attention."""

    @abstractmethod
    def passed(self, residual: Tensor, normed: Tensor) -> Tensor:
        """What a further entry takes of the head, `[N, H]`."""

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

        embeddings `[T, H]`: of the tokens after the entries' positions. hidden `[T, H]`: `taken` of the model, or the head's own.
        phases, plan, output_rows: as of `DecoderLayer.forward`.
        """
        stream, x = self.inputs_of(embeddings, hidden)
        if output_rows is not None and not len(output_rows):
            self.layer.store(x, phases, plan, ops)
            return stream[:0], stream[:0]
        residual, normed, _ = self.layer.forward(stream, x, self.final_norm, phases, plan, ops, output_rows)
        return normed, self.passed(residual, normed)


@dataclass(frozen=True, slots=True)
class MtpHead(DraftHead):
    """Multi-token prediction, in the model's checkpoint. Source: DeepSeek-V3 (DeepSeek-AI 2024), section 2.2."""

    projection: Linear
    """`[T, 2 H]` -> `[T, H]`."""
    hidden_first: bool
    """See `DraftNames`."""
    passes_normed: bool
    """See `DraftNames`."""

    def taken(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return hidden

    def inputs_of(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        parts = (self.embedding_norm(embeddings), self.hidden_norm(hidden))
        stream = self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        norm = self.layer.input_norm
        return stream, stream if norm is None else norm(stream)

    def passed(self, residual: Tensor, normed: Tensor) -> Tensor:
        return normed if self.passes_normed else residual


@dataclass(frozen=True, slots=True)
class EagleHead(DraftHead):
    """See `eagle_head.py`."""

    combine: Linear
    """`[T, 3 H]` -> `[T, H]`."""
    lm_head: OutputHead
    """`[N, H]` -> `[N, Vd]` float32."""
    token_ids: Tensor | None
    """`[Vd]`: the model's id of each token of the head; None: they are equal."""
    vocab_size: int
    """V, of the model."""
    embedding: Embedding | None
    """See `own_embedding`."""
    norms_residual: bool
    """See `DraftHeadConfig`."""
    taps: tuple[int, ...]

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        return self.taps

    @property
    def own_embedding(self) -> Embedding | None:
        return self.embedding

    def taken(self, hidden: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return self.combine(torch.cat(list(inputs), dim=-1))

    def inputs_of(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.embedding_norm(embeddings), normed), dim=-1)
        # the layer may overwrite the stream
        return normed if self.norms_residual else hidden.clone(), x

    def passed(self, residual: Tensor, normed: Tensor) -> Tensor:
        return residual

    def own_logits(self, normed: Tensor) -> Tensor | None:
        """Minus infinity for tokens that the head cannot draft."""
        found = self.lm_head(normed)
        if self.token_ids is None:
            return found
        logits = found.new_full((len(normed), self.vocab_size), -torch.inf)
        return logits.index_copy_(1, self.token_ids, found)
