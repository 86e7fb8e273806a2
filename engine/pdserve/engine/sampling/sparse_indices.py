"""`SparseIndices`: single entries of a step's logits, as index arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.sampling.placed_arrays import PlacedArrays


@dataclass(frozen=True, slots=True)
class SparseIndices:
    """Places in the logits `[N, V]`: entry e is row `rows[e]`, token `token_ids[e]`."""

    rows: IntArray
    token_ids: IntArray

    @classmethod
    def of(cls, parts: Sequence[tuple[int, IntArray]]) -> SparseIndices | None:
        """Indices of all (row, token ids); None if there are none."""
        if not parts:
            return None
        counts = [len(token_ids) for _, token_ids in parts]
        return cls(np.repeat([row for row, _ in parts], counts), np.concatenate([token_ids for _, token_ids in parts]))

    def arrays(self) -> list[IntArray]:
        return [self.rows, self.token_ids]

    def index(self, placed: PlacedArrays) -> tuple[Tensor, Tensor]:
        """For indexing the logits."""
        return placed(self.rows), placed(self.token_ids)
