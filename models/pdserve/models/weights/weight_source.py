"""`WeightSource`: weights by name, as a checkpoint or another origin has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdserve.models.weights.rank_shard import Part

if TYPE_CHECKING:
    from pdserve.models.weights.quantized.stored_matrix import StoredMatrix

FLOATS = ("F32", "BF16", "F16")
"""Dtypes that can be served, by their names in a header."""


class WeightSource(ABC):
    """Weights by name, in the form in which a model computes with them."""

    folder: Path
    """The model folder."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of all weights."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises: ConfigError for a name that is missing."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Origin and name of a weight, for messages."""

    @abstractmethod
    def pieces(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Iterator[Tensor]:
        """A weight, or a part of it, as one tensor or in runs of rows, which the caller copies.

        shape: of the whole weight. dtypes: in which it may be stored. part: only this is read. Raises: ConfigError for a weight
        that is missing, or has another shape or type.
        """

    @abstractmethod
    def release(self, tensor: Tensor) -> None:
        """Return the memory of a tensor from `pieces` or `read`, of which the caller uses nothing any more."""

    def stored(self, name: str) -> StoredMatrix | None:
        """The weight in the form in which it is stored; None: it is stored as numbers of one dtype."""
        return None

    def read(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Tensor:
        """`pieces` as one tensor. Raises: ConfigError."""
        pieces = list(self.pieces(name, shape, dtypes, part))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
