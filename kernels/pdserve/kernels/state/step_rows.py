"""`StepRows`: which rows of a step belong to which sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StepRows(Protocol):
    """Sequences with one token each, then others with one or more."""

    @property
    def num_decodes(self) -> int:
        """Sequences `0..num_decodes - 1` have one token each."""

    @property
    def chunks(self) -> Sequence[tuple[int, int]]:
        """(first row, row after the last) of each further sequence."""
