"""`resampled`: samples at another sampling rate, by a windowed sinc filter with linear phase.

Output sample i lies at the time `i * rate / new_rate`, in samples of the input. It is the sum of the samples around it, each
multiplied with the filter's value at its distance. As the rates are integers there are `new_rate / gcd` different distances to the
next sample; the filter is computed once for each.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MIN_RATE, MAX_RATE = 4_000, 192_000
"""Samples per second that are read. They bound the filter: the table has at most `new_rate` rows."""
_ZERO_CROSSINGS = 16
"""Zero crossings of half the filter, at the lower rate."""
_ROLLOFF = 0.95
"""Part of the lower rate's band that passes; the filter falls from there to the band's end."""
_CHUNK = 1 << 13
"""Output samples that are computed at once."""


def resampled(samples: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    """`[n]` -> `[ceil(n * new_rate / rate)]`. Both rates: within `MIN_RATE` and `MAX_RATE`."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    old, new = rate // divisor, new_rate // divisor
    cutoff = min(1.0, new / old) * _ROLLOFF
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    # distances of the taps from an output sample that lies `phase / new` behind a sample
    places = np.arange(-half, half + 1, dtype=np.float64)
    distances = places[None, :] - (np.arange(new, dtype=np.float64) / new)[:, None]
    window = np.cos(np.clip(distances / (half + 1), -1, 1) * (math.pi / 2)) ** 2
    table = np.sinc(distances * cutoff) * window
    # silence stays silence, and a constant stays itself
    table = (table / table.sum(axis=1, keepdims=True)).astype(np.float32)
    num_new = -(-len(samples) * new // old)
    padded = np.concatenate((np.zeros(half, np.float32), samples, np.zeros(half + 1, np.float32)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    result = np.empty(num_new, np.float32)
    for first in range(0, num_new, _CHUNK):
        starts, phases = np.divmod(np.arange(first, min(first + _CHUNK, num_new)) * old, new)
        result[first : first + len(starts)] = np.einsum("ij,ij->i", windows[starts], table[phases])
    return result
