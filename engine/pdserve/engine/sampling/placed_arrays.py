"""`PlacedArrays`: the arrays of a step's sampling stages, on the device of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class PlacedArrays:
    """Looks up tensors by the arrays that they are copies of, so that all stages of a step share one copy to the device."""

    def __init__(self) -> None:
        self._placed: dict[int, tuple[NDArray[Any], Tensor]] = {}

    def add(self, arrays: Sequence[NDArray[Any]], tensors: Sequence[Tensor]) -> PlacedArrays:
        """Returns itself. tensors: copies of `arrays`; on a CPU they share the arrays' memory."""
        for array, tensor in zip(arrays, tensors, strict=True):
            self._placed[id(array)] = (array, tensor)  # an array's id is its own as long as it lives
        return self

    def copy_to(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> PlacedArrays:
        """Returns itself. Copies each array by itself."""
        return self.add(arrays, [torch.from_numpy(array).to(device) for array in arrays])

    def __call__(self, array: NDArray[Any]) -> Tensor:
        """The tensor of one of the arrays. Raises: KeyError for any other."""
        return self._placed[id(array)][1]
