"""`BodyWeights`: a checkpoint of a model's body, under the names that the weights have in the whole model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from pdserve.models.weights.checkpoint import FLOATS, Checkpoint
from pdserve.models.weights.rank_shard import Part

_PREFIX = "model."


class BodyWeights:
    """A `WeightSource`. Bodies are stored without the prefix, or with it where they were saved by the whole model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored_names = {
            name if name.startswith(_PREFIX) else f"{_PREFIX}{name}": name for name in checkpoint.names
        }

    @property
    def folder(self) -> Path:
        return self._checkpoint.folder

    @property
    def names(self) -> list[str]:
        return list(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._stored(name))

    def where(self, name: str) -> str:
        return self._checkpoint.where(self._stored(name))

    def read(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Tensor:
        return self._checkpoint.read(self._stored(name), shape, dtypes, part)

    def _stored(self, name: str) -> str:
        """A name that is missing is shown without the prefix."""
        return self._stored_names.get(name, name.removeprefix(_PREFIX))
