"""`RenamedWeights`: a checkpoint under other names; `BodyWeights` and `ImageModelWeights`: those of two kinds of checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import Tensor

from pdserve.models.weights.quantized.stored_matrix import StoredMatrix
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_source import FLOATS, WeightSource

_PREFIX = "model."


class RenamedWeights(WeightSource):
    """A source under other names."""

    def __init__(self, checkpoint: WeightSource, served_name: Callable[[str], str]) -> None:
        """served_name: name in the checkpoint -> name here."""
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._stored_names = {served_name(name): name for name in checkpoint.names}

    @property
    def names(self) -> list[str]:
        return list(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._stored_name(name))

    def where(self, name: str) -> str:
        return self._checkpoint.where(self._stored_name(name))

    def pieces(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Iterator[Tensor]:
        return self._checkpoint.pieces(self._stored_name(name), shape, dtypes, part)

    def stored(self, name: str) -> StoredMatrix | None:
        return self._checkpoint.stored(self._stored_name(name))

    def release(self, tensor: Tensor) -> None:
        self._checkpoint.release(tensor)

    def _stored_name(self, name: str) -> str:
        return self._stored_names.get(name, name)


class BodyWeights(RenamedWeights):
    """Bodies are stored without the prefix, or with it where they were saved by the whole model."""

    def __init__(self, checkpoint: WeightSource, prefix: str = _PREFIX) -> None:
        super().__init__(checkpoint, lambda name: name if name.startswith(prefix) else f"{prefix}{name}")
        self._prefix = prefix

    def _stored_name(self, name: str) -> str:
        """A name that is missing is shown without the prefix."""
        return self._stored_names.get(name, name.removeprefix(self._prefix))


_IMAGE_MODEL_PREFIXES = {
    "model.language_model.": _PREFIX,
    "model.visual.": "visual.",
    "language_model.": "",
}


class ImageModelWeights(RenamedWeights):
    """Models with images name the language model's weights as a text model does, or under a prefix."""

    def __init__(self, checkpoint: WeightSource) -> None:
        super().__init__(checkpoint, image_model_name)


def image_model_name(name: str) -> str:
    """The name here of a weight or module of a model with images: as in a text model, or from `visual.` on."""
    for stored, served in _IMAGE_MODEL_PREFIXES.items():
        if name.startswith(stored):
            return served + name.removeprefix(stored)
    return name
