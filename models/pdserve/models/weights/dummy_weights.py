"""`DummyWeights`: weights that are drawn instead of read, so that a model's shape can be measured without its checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_source import FLOATS, WeightSource

_SPREAD = 0.02
"""Standard deviation of matrices. Hidden states then neither vanish nor overflow in any served dtype."""


class DummyWeights(WeightSource):
    """Has every weight that is asked for, drawn on the device in the served dtype.

    Matrices are normally distributed, by a generator that the weight's name seeds; norms are 1 and biases 0. Two processes with the
    same kind of device and the same torch draw the same numbers.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.folder = folder
        self._dtype = dtype
        self._device = torch.device(device)
        self._shapes: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of_model(
        cls, folder: Path, dtype: torch.dtype, device: str, load: Callable[[DummyWeights], object]
    ) -> DummyWeights:
        """With the names of a whole model, by which progress is measured. load: reads the model from weights on the meta device."""
        shapes = cls(folder, dtype, "meta")
        load(shapes)
        weights = cls(folder, dtype, device)
        weights._shapes = shapes._shapes
        return weights

    @property
    def names(self) -> list[str]:
        """Names that were read so far."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def where(self, name: str) -> str:
        return f"{self.folder}: {name}, drawn"

    def pieces(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = FLOATS, part: Part | None = None
    ) -> Iterator[Tensor]:
        """A new tensor in the served dtype. A part is cut from the whole, so that it has the same numbers for any number of ranks.

        Raises: torch.OutOfMemoryError.
        """
        whole = self._drawn(name, shape)
        yield whole if part is None else whole[part.slices(len(shape))]

    def release(self, tensor: Tensor) -> None:
        """Nothing: the tensor is the caller's."""

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._shapes[name] = shape
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if tensor.is_meta:
            return tensor
        if len(shape) == 1:
            return tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(0.0, _SPREAD, generator=generator)
