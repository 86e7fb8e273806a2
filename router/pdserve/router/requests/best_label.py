"""`best_label`: the class that a classification head gives the highest number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BestLabel(NamedTuple):
    """One class of a model."""

    index: int
    label: str


def best_label(probs: Sequence[float], labels: Sequence[str]) -> BestLabel:
    """The first of the highest. labels: by id; an id without one has the name that transformers gives it."""
    best = max(range(len(probs)), key=probs.__getitem__)
    return BestLabel(best, labels[best] if best < len(labels) else f"LABEL_{best}")
