"""The noise of sampling: a function of (seed, sequence index, output position), not of any generator's history.

So preemption, batching, migration and the prefill/decode split cannot change a sampled text (I5).
Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied once per coordinate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: NDArray[np.int64], indexes: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) a row. All `[N]`."""
    with np.errstate(over="ignore"):  # wrapping is the point
        state = _mix(seeds.astype(np.uint64))
        state = _mix(state ^ _mix(indexes.astype(np.uint64) + np.uint64(1)))
        state = _mix(state ^ _mix(positions.astype(np.uint64) + _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
