"""`RenamedWeights`: a checkpoint under other names; `BodyWeights` and `ImageModelWeights`: those of two kinds of checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from pdserve.models.weights.checkpoint import FLOATS, Checkpoint
from pdserve.models.weights.rank_shard import Part

_PREFIX = "model."


class RenamedWeights:
    """A `WeightSource`."""

    def __init__(self, checkpoint: Checkpoint, served_name: Callable[[str], str]) -> None:
        """served_name: name in the checkpoint -> name here."""
        self._checkpoint = checkpoint
        self._stored_names = {served_name(name): name for name in checkpoint.names}

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

    def release(self, tensor: Tensor) -> None:
        self._checkpoint.release(tensor)

    def _stored(self, name: str) -> str:
        return self._stored_names.get(name, name)


class BodyWeights(RenamedWeights):
    """Bodies are stored without the prefix, or with it where they were saved by the whole model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, lambda name: name if name.startswith(_PREFIX) else f"{_PREFIX}{name}")

    def _stored(self, name: str) -> str:
        """A name that is missing is shown without the prefix."""
        return self._stored_names.get(name, name.removeprefix(_PREFIX))


_IMAGE_MODEL_PREFIXES = {
    "model.language_model.": _PREFIX,
    "model.visual.": "visual.",
    "language_model.": "",
}


class ImageModelWeights(RenamedWeights):
    """Models with images name the language model's weights as a text model does, or under a prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint, image_model_name)


def image_model_name(name: str) -> str:
    """The name here of a weight or module of a model with images: as in a text model, or from `visual.` on."""
    for stored, served in _IMAGE_MODEL_PREFIXES.items():
        if name.startswith(stored):
            return served + name.removeprefix(stored)
    return name
