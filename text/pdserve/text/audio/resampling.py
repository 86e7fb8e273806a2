"""`resampled`: samples at another sampling rate, by libsoxr."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def resampled(samples: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    """`[n]` -> `[ceil(n * new_rate / rate)]`; rates are samples per second."""
    if rate == new_rate:
        return samples
    # imported here: a router of a model without sound does not need it
    import soxr

    num_new = -(-len(samples) * new_rate // rate)
    # libsoxr rounds the length, down too: a single sample may become none
    found = soxr.resample(samples, rate, new_rate)[:num_new]
    padded: NDArray[np.float32] = np.pad(found, (0, num_new - len(found)))
    return padded
