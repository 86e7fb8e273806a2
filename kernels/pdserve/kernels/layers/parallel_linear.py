"""Layers of which each rank of a tensor-parallel model has a part: rows of a weight, or columns.

A layer whose output is divided among the ranks (queries, keys and values; gate and up) is a plain `Linear` over the rank's rows.
The layer after it has the columns for those inputs: its product is one term of a sum over all ranks.
Source: Megatron-LM (Shoeybi et al. 2019), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, OutputHead
from pdserve.kernels.rank_group import RankGroup


class RowParallelLinear:
    """A `Linear` whose inputs are divided among the ranks; the result is whole on every rank."""

    def __init__(self, part: Linear, bias: Tensor | None, group: RankGroup) -> None:
        """part: the weight's columns of this rank, without bias."""
        self._part = part
        self._bias = bias
        self._group = group

    def with_part(self, wrap: Callable[[Linear], Linear]) -> RowParallelLinear:
        """The same layer with another product for this rank's inputs. wrap: of the present one."""
        return RowParallelLinear(wrap(self._part), self._bias, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        y = self._group.all_reduce(self._part(x))
        return y if self._bias is None else y.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(self(x))


class VocabParallelEmbedding:
    """The embeddings of this rank's part of the vocabulary; others are 0 before the sum over all ranks, which is exact then."""

    def __init__(self, weight: Tensor, group: RankGroup) -> None:
        """weight `[V / R, H]`: the rows from `rank * V / R` on."""
        self._weight = weight
        self._first = group.rank * len(weight)
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, H]`."""
        places = token_ids - self._first
        is_elsewhere = (places < 0) | (places >= len(self._weight))
        found = self._weight.index_select(0, places.masked_fill_(is_elsewhere, 0))
        return self._group.all_reduce(found.masked_fill_(is_elsewhere.unsqueeze(-1), 0))


class ParallelLMHead:
    """The output head over this rank's part of the vocabulary; rank 0 gets the logits of all parts."""

    def __init__(self, part: OutputHead, group: RankGroup) -> None:
        self._part = part
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` at rank 0, `[N, 0]` elsewhere: only rank 0 samples."""
        own = self._part(x)
        parts = self._group.gather(own)
        return own[:, :0] if parts is None else torch.cat(parts, -1)
