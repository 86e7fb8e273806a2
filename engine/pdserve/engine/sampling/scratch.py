"""`Scratch`: memory for temporary arrays of a step, reused by later steps.

Fresh memory for arrays of a vocabulary's size costs a page fault per 4 KiB, which takes longer than filling it.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)


class Scratch:
    """Named arrays of one thread."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: type[Number]) -> NDArray[Number]:
        """An uninitialised array, valid until the next call with the same name."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        held = self._held.get(name)
        if held is None or len(held) < size:
            held = self._held[name] = np.empty(size, dtype=np.uint8)
        return held[:size].view(dtype).reshape(shape)
