"""`SparseIndices`: single entries of a step's logits, as index arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SparseIndices:
    """Places in the logits `[N, V]`: entry e is row `rows[e]`, token `token_ids[e]`."""

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, NDArray[np.int64]]]) -> SparseIndices | None:
        """Indices of all (row, token ids); None if there are none."""
        if not parts:
            return None
        counts = [len(token_ids) for _, token_ids in parts]
        return cls(np.repeat([row for row, _ in parts], counts), np.concatenate([token_ids for _, token_ids in parts]))

    def index(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """For indexing `like`, on its device."""
        return torch.from_numpy(self.rows).to(like.device), torch.from_numpy(self.token_ids).to(like.device)
