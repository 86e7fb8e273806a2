"""`PooledStates` and `PooledMatrices`: where the kernels of a step find the states of its sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PooledStates:
    """The states of one layer, and a step's B sequences: those with one token come first."""

    states: Tensor
    """`[num_blocks, H, L, N]` float32, contiguous."""
    blocks: Tensor
    """`[2, B]` int64, contiguous: see `InPlacePlan`."""
    starts: Tensor
    """`[B + 1]` int64: the first row of each sequence, and the number of rows."""
    num_decodes: int
    """See `StatePlan`."""
    longest: int
    """Tokens of the longest sequence."""
    layer: int

    @property
    def num_sequences(self) -> int:
        return self.blocks.shape[1]

    @property
    def num_chunks(self) -> int:
        return self.num_sequences - self.num_decodes


@dataclass(frozen=True, slots=True)
class PooledMatrices:
    """The matrices in these states that a rule changes."""

    pooled: PooledStates
    first: int
    """See `StatePlan.recur`, as of `shape`."""
    shape: tuple[int, int]
