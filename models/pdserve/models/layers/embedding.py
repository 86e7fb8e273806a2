"""Embeddings of token ids."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pdserve.kernels.layers.parallel_linear import VocabParallelEmbedding
from pdserve.kernels.rank_group import RankGroup

Embedding = Callable[[Tensor], Tensor]
"""`[T]` int64 token ids -> `[T, H]`."""


def make_embedding(weight: Tensor, scale: float, group: RankGroup | None) -> Embedding:
    """The embeddings times `scale`. weight: `[V, H]`, or the rows of this rank of the group."""
    embedding = _table(weight) if group is None else VocabParallelEmbedding(weight, group)
    return embedding if scale == 1.0 else lambda token_ids: embedding(token_ids).mul_(scale)


def _table(weight: Tensor) -> Embedding:
    return lambda token_ids: weight.index_select(0, token_ids)
