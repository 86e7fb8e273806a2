"""The tokens that a step with drafts adds to each sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.arrays import IntArray

NO_DRAFT = -2
"""In place of a draft after the last position of a run: no sampled token equals it."""


def confirmed_lengths(
    token_ids: IntArray, drafts: IntArray, is_usable: NDArray[np.bool_], lengths: IntArray
) -> IntArray:
    """`[R]`: tokens that each of R runs adds, from its first: those that equal their draft, and one more.

    token_ids `[N]`: sampled at each position; drafts `[N]`: what the position after was computed with, or `NO_DRAFT`; is_usable
    `[N]`: False where nothing could be sampled, which ends a run before it, though not before its first token. lengths `[R]`:
    positions of each run, at least 1; N is their sum.
    """
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(len(token_ids)) - np.repeat(firsts, lengths)
    # a run ends after the first token that differs from its draft, and before the first that is not usable
    end = np.where(is_usable, np.where(token_ids == drafts, len(token_ids) + 1, places + 1), places)
    return np.maximum(np.minimum.reduceat(end, firsts), 1)
