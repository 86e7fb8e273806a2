"""`column_runs`: which channels' columns each head of a state keeps, and where."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.kernels.state.causal_conv import CausalConv


def column_runs(conv: CausalConv, num_heads: int) -> NDArray[np.int64]:
    """`[n, 5]`: head, place of the columns in its state, first channel, number of channels, 1 if no head before it has these."""
    runs, place, first = [], 0, 0
    for part in conv.parts:
        groups = list(range(num_heads)) if part.groups is None else part.groups.tolist()
        for head, group in enumerate(groups):
            is_first = groups.index(group) == head
            runs.append((head, place, first + group * part.num_channels, part.num_channels, is_first))
        place += part.num_channels * (conv.weight.shape[1] - 1)
        first += part.num_channels * (max(groups) + 1)
    return np.array(runs, np.int64)
