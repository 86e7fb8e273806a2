"""`best_label`: the class that a classification head gives the highest number."""

from __future__ import annotations

from collections.abc import Sequence


def best_label(probs: Sequence[float], labels: Sequence[str]) -> tuple[int, str]:
    """Id and name of the first of the highest. labels: by id; an id without one has the name that transformers gives it."""
    best = max(range(len(probs)), key=probs.__getitem__)
    return best, labels[best] if best < len(labels) else f"LABEL_{best}"
