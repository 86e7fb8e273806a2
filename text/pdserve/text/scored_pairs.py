"""Pairs of texts that are scored, and the score of a model without a classification head."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from pdserve.common.errors import InvalidRequest


def paired(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """Text by text, or the only text of `first` with each of `second`. names: the client's, of both.

    Raises: InvalidRequest for other numbers of texts, and for an empty one.
    """
    for name, texts in zip(names, (first, second), strict=True):
        if not texts:
            raise InvalidRequest(f"{name} is empty, at least one text is needed", name)
        for place, text in enumerate(texts):
            if not text:
                raise InvalidRequest(f"{name}[{place}] is empty, at least one token is needed", name)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: one, or as many, are needed", names[0]
        )
    return list(zip(first if len(first) == len(second) else list(first) * len(second), second, strict=True))


def cosine_similarity(first: Sequence[float], second: Sequence[float]) -> float:
    """From -1 to 1; 0 if one of the vectors, which have the same length, is zero."""
    norms = math.hypot(*first) * math.hypot(*second)
    return sum(map(operator.mul, first, second)) / norms if norms else 0.0
