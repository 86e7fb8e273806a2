"""`Drafting`: gets the drafts of the next step from the drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pdserve.engine.arrays import IntArray
from pdserve.engine.scheduler_output import ModelRunnerOutput
from pdserve.engine.speculation.drafter import Drafter, DraftRows


class DraftedBatch(Protocol):
    """What is read of an `InputBatch`."""

    @property
    def rows(self) -> Mapping[str, int]:
        """req_id -> row."""

    @property
    def num_speculative(self) -> IntArray:
        """`[num_rows]`: tokens to draft, at most."""

    @property
    def token_ids(self) -> IntArray: ...

    @property
    def num_tokens(self) -> IntArray: ...

    @property
    def sampling_parameters(self) -> Callable[[IntArray, int], Any]:
        """This and the two before: as of `DraftRows`."""


class Drafting:
    """One runner's."""

    def __init__(self, drafter: Drafter, max_rows: int | None) -> None:
        """max_rows: sequences of the batch beyond which nothing is drafted; None: no limit."""
        self._drafter = drafter
        self._max_rows = max_rows

    def propose(self, batch: DraftedBatch, result: ModelRunnerOutput) -> None:
        """Write the drafts of the sequences that a step gave tokens into its result."""
        if self._max_rows is not None and len(batch.rows) > self._max_rows:
            return
        found = {req_id: batch.rows[req_id] for req_id in result.req_ids if req_id in batch.rows}
        limits = batch.num_speculative[list(found.values())]
        wanted = np.flatnonzero(limits)
        if not len(wanted):
            return
        req_ids, rows = list(found), np.array(list(found.values()))
        drafts = self._drafter.propose(
            DraftRows(rows[wanted], limits[wanted], batch.token_ids, batch.num_tokens, batch.sampling_parameters)
        )
        result.draft_token_ids = {
            req_ids[place]: list(of_row) for place, of_row in zip(wanted.tolist(), drafts, strict=True) if of_row
        }
