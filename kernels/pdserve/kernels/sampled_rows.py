"""The sampling parameters of a step's rows, packed into one array, so that they reach a device in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PARAMETERS = 7
"""Numbers per row."""
LOWEST_Y = -50.0
"""Tokens with a lower scaled logit y are dropped: noise lies between -3.81 and 45.06, so they lose against the most likely token,
whose y is 0. Their mass is 0, and in the order they follow all others, so no border changes which of the others are kept."""


class SampledRows(Protocol):
    """The sampling parameters of N rows, `[N]` each, on the host."""

    @property
    def temperature(self) -> NDArray[np.float32]:
        """0 for the most likely token."""

    @property
    def top_p(self) -> NDArray[np.float32]: ...

    @property
    def top_k(self) -> NDArray[np.int64]:
        """Vocabulary size: no limit."""

    @property
    def min_p(self) -> NDArray[np.float32]: ...

    @property
    def seeds(self) -> NDArray[np.int64]: ...

    @property
    def indexes(self) -> NDArray[np.int64]: ...

    @property
    def positions(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class SamplingStages:
    """The stages that any row of a step needs, known on the host, so that a device runs no other."""

    is_random: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, rows: SampledRows, vocab_size: int) -> SamplingStages:
        is_random = bool((rows.temperature > 0).any())
        return cls(
            is_random,
            is_random and bool((rows.top_k < vocab_size).any()),
            is_random and bool((rows.top_p < 1).any()),
            is_random and bool((rows.min_p > 0).any()),
        )


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The parameters of N rows on the device of their logits."""

    parameters: Tensor
    """`[PARAMETERS, N]` int64, of `packed`."""
    stages: SamplingStages


def packed(rows: SampledRows) -> NDArray[np.int64]:
    """`[PARAMETERS, N]`: seeds, indexes, positions, top_k, and the bits of temperature, of the lowest y and of top_p.

    Temperature and y are float32 in the low half of their number, top_p is float64.
    """
    with np.errstate(divide="ignore"):
        floor = np.log(rows.min_p.astype(np.float64)).astype(np.float32)
    numbers = np.empty((PARAMETERS, len(rows.temperature)), np.int64)
    numbers[0], numbers[1], numbers[2], numbers[3] = rows.seeds, rows.indexes, rows.positions, rows.top_k
    numbers[4] = rows.temperature.astype(np.float32).view(np.int32)
    numbers[5] = np.maximum(floor, np.float32(LOWEST_Y)).view(np.int32)
    numbers[6] = rows.top_p.astype(np.float64).view(np.int64)
    return numbers
