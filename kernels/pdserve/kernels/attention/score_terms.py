"""`ScoreTerms`: what a layer adds to its scores in addition to `q k^T`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScoreTerms(NamedTuple):
    """Arguments of `AttentionPlan.attend` that a spec may ask for."""

    sinks: Tensor | None = None
    """`[Hq]`"""
    distance_bias: Tensor | None = None
    """`[Hq, n]`: column j for the key j tokens before the query, the last column for those further back."""


NO_TERMS = ScoreTerms()


def bias_at(distance_bias: Tensor, distances: Tensor) -> Tensor:
    """`[Hq, n]`, distances `[*]` int64, negative ones as 0 -> `[Hq, *]`."""
    return distance_bias[:, distances.clamp(0, distance_bias.shape[1] - 1)]
