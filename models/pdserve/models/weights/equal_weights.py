"""`are_equal`: a comparison of two weights of which one is in a file; `are_stored_equal`: of two that both are."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.models.weights.weight_source import WeightSource

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


def are_stored_equal(source: WeightSource, one: str, other: str, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """As `are_equal`, for the names of two weights of this shape. Raises: ConfigError, as `WeightSource.read`."""
    first, second = source.read(one, shape), source.read(other, shape)
    is_equal = are_equal(first, second, dtype)
    for tensor in (first, second):
        source.release(tensor)
    return is_equal
