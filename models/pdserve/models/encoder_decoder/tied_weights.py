"""`TiedWeights`: the embedding that encoder, decoder and output head share, by the names that a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.common.errors import UnsupportedModel
from pdserve.models.weights.equal_weights import are_stored_equal
from pdserve.models.weights.weight_loader import WeightLoader
from pdserve.models.weights.weight_source import WeightSource


class TiedWeights(NamedTuple):
    """Names in the checkpoint."""

    embedding: str
    head: str
    """The same name if the head is tied."""
    ignored: frozenset[str]
    """Copies."""

    @classmethod
    def find(
        cls,
        source: WeightSource,
        names: Sequence[str],
        head: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        is_tied: bool,
    ) -> TiedWeights:
        """names: of the embedding, the shared one first. shape: `[V, H]`. dtype: the served one.

        As in transformers, a head with numbers of its own is used, even if it should be tied. Raises: ConfigError, UnsupportedModel
        for an encoder and a decoder with different embeddings.
        """
        there = frozenset(source.names)
        known = [name for name in names if name in there] or ([head] if is_tied and head in there else [names[0]])
        embedding, copies = known[0], known[1:]
        for name in copies:
            if not are_stored_equal(source, embedding, name, shape, dtype):
                raise UnsupportedModel(
                    f"{source.folder}: {name} has other numbers than {embedding}; encoder and decoder share their embedding"
                )
        if not is_tied:
            return cls(embedding, head, frozenset(copies))
        if head in there and head != embedding:
            if not are_stored_equal(source, embedding, head, shape, dtype):
                return cls(embedding, head, frozenset(copies))
            copies.append(head)
        return cls(embedding, embedding, frozenset(copies))

    def load(self, weights: WeightLoader, vocab_size: int, hidden_size: int) -> tuple[Tensor, Tensor]:
        """Embedding and head, `[V, H]` each; one tensor if they are tied."""
        embedding = weights.tensor(self.embedding, vocab_size, hidden_size)
        if self.head == self.embedding:
            return embedding, embedding
        return embedding, weights.tensor(self.head, vocab_size, hidden_size)
