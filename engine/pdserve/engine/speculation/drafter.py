"""`Drafter`: proposes the next tokens of sequences; the model then computes and samples all of them in one step.

The text does not depend on a drafter: each position is sampled with its own noise, as without drafts, and a draft is kept if it
equals what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.engine.arrays import IntArray


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows of the batch for which drafts are wanted. R rows."""

    rows: IntArray
    """`[R]`"""
    limits: IntArray
    """`[R]`: tokens to draft, at most; at least 1."""
    token_ids: IntArray
    """`[num_rows, N]`, the batch's: tokens of each row, prompt first. Read only."""
    num_tokens: IntArray
    """`[num_rows]`: known tokens of each row."""
    parameters: Callable[[IntArray, int], Any]
    """(rows `[n]`, number of drafts) -> `SamplingMetadata` of the tokens after these drafts, without rules."""


class Drafter(Protocol):
    """Called by the engine thread after a step's tokens are known."""

    def propose(self, wanted: DraftRows) -> Sequence[Sequence[int]]:
        """Drafts of each of `wanted.rows`, in their order: no more than the row's limit, none where nothing is found."""
