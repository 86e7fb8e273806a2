"""`are_equal`: a comparison of two weights of which one is in a file."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 4096
"""Rows compared at a time, so that neither weight is in memory twice."""


def are_equal(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """True if both have the same numbers in the served dtype.

    Both `[V, H]`, of any dtype. transformers compares tied weights too, and does not tie them if they differ, even if
    `tie_word_embeddings` is true.
    """
    return all(
        torch.equal(one[start : start + _ROWS].to(dtype), other[start : start + _ROWS].to(dtype))
        for start in range(0, len(one), _ROWS)
    )
