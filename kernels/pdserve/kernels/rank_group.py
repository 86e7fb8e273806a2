"""`RankGroup`: the ranks of a tensor-parallel model, and the operations in which all of them take part."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """One rank's view. Every rank calls the same operations in the same order, with tensors of equal shapes and dtypes.

    Raises: RuntimeError, from any operation, when another rank has ended or does not answer.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """R, number of ranks, at least 2."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' tensors, the same bits on every rank; overwrites x, and returns it.

        On a CPU a number of the result depends only on the same number of each rank, not on the tensor's shape.
        """

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """x of each rank, at rank 0; None elsewhere."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x; overwrites x, and returns it."""

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values."""
