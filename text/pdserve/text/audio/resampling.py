"""`resampled`: samples at another sampling rate, by a windowed sinc filter with linear phase.

Output sample i lies at the time `i * rate / new_rate`, in samples of the input. It is the sum of the samples around it, each
multiplied with the filter's value at its distance. As the rates are integers there are `new_rate / gcd` different distances to the
next sample; the filter is computed once for each. Where that would be more than `_MAX_PHASES`, the filter is computed at so many
distances and one more, and lies between two of them on a straight line, which is off by less than 1e-6 of a sample.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MIN_RATE, MAX_RATE = 4_000, 192_000
"""Samples per second that are read. They bound the filter's length."""
_ZERO_CROSSINGS = 16
"""Zero crossings of half the filter, at the lower rate."""
_ROLLOFF = 0.95
"""Part of the lower rate's band that passes; the filter falls from there to the band's end."""
_MAX_PHASES = 1024
"""More than all rates need that files commonly have: 11,025 and 22,050 need most, 640 and 320 for 16,000."""
_PRODUCTS = 1 << 19
"""Products of a sample and the filter that are in memory at once."""


def resampled(samples: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    """`[n]` -> `[ceil(n * new_rate / rate)]`. Both rates: within `MIN_RATE` and `MAX_RATE`."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    cutoff = min(1.0, new / old) * _ROLLOFF
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    num_phases = min(new, _MAX_PHASES)
    # the last row is the first one of the next sample
    table = _filter(half, cutoff, np.arange(num_phases + 1, dtype=np.float64) / num_phases)
    num_new = -(-len(samples) * new // old)
    padded = np.concatenate((np.zeros(half, np.float32), samples, np.zeros(half + 1, np.float32)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    result = np.empty(num_new, np.float32)
    chunk = max(1, _PRODUCTS // (2 * half + 1))
    for first in range(0, num_new, chunk):
        starts, parts = np.divmod(np.arange(first, min(first + chunk, num_new)) * old, new)
        phases, rest = np.divmod(parts * num_phases, new)
        inputs = windows[starts]
        found = result[first : first + len(starts)]
        found[:] = np.einsum("ij,ij->i", inputs, table[phases])
        if new > num_phases:
            found += (rest / new).astype(np.float32) * (np.einsum("ij,ij->i", inputs, table[phases + 1]) - found)
    return result


def _filter(half: int, cutoff: float, phases: NDArray[np.float64]) -> NDArray[np.float32]:
    """`[P, 2 * half + 1]`: the taps of output samples that lie `phases`, `[P]` from 0 to 1, behind a sample."""
    places = np.arange(-half, half + 1, dtype=np.float64)
    distances = places[None, :] - phases[:, None]
    window = np.cos(np.clip(distances / (half + 1), -1, 1) * (math.pi / 2)) ** 2
    table = np.sinc(distances * cutoff) * window
    # silence stays silence, and a constant stays itself
    scaled: NDArray[np.float32] = (table / table.sum(axis=1, keepdims=True)).astype(np.float32)
    return scaled
