"""`NgramDrafter`: drafts what followed a sequence's last tokens where they stand in it before.

Of the n-grams that end a sequence, the longest that stands in it earlier is taken, and of its places the first, since most tokens
follow there. Source: vLLM's prompt lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.engine.arrays import IntArray
from pdserve.engine.speculation.drafter import DraftRows


class NgramDrafter:
    """A `Drafter` without state. The cost per sequence and step is one pass over its tokens."""

    def __init__(self, shortest: int, longest: int, image_token_id: int | None = None) -> None:
        """shortest, longest: tokens of the n-grams that are looked up. image_token_id: ends a draft; None: no token does."""
        self._shortest, self._longest = shortest, longest
        self._image_token_id = image_token_id

    def propose(self, wanted: DraftRows) -> Sequence[Sequence[int]]:
        return [
            self._of_tokens(wanted.token_ids[row, : wanted.num_tokens[row]], limit)
            for row, limit in zip(wanted.rows.tolist(), wanted.limits.tolist(), strict=True)
        ]

    def _of_tokens(self, tokens: IntArray, limit: int) -> list[int]:
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        """Places where an n-gram that equals the last one may end."""
        length = 1
        found = ends if self._shortest == 1 else ends[:0]
        while len(ends) and length < self._longest:
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[-1 - length]] if length < len(tokens) else ends[:0]
            length += 1
            if len(ends) and length >= self._shortest:
                found = ends
        if not len(found):
            return []
        first = int(found[0]) + 1
        drafted: list[int] = tokens[first : first + limit].tolist()
        if self._image_token_id is not None and self._image_token_id in drafted:
            # it stands for an image in a prompt, and no model predicts it
            return drafted[: drafted.index(self._image_token_id)]
        return drafted
