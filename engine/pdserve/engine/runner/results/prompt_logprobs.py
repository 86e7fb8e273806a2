"""Log-probabilities of prompt tokens: of each token but the first, given the tokens before it.

A chunk of a prompt gives the log-probabilities of the tokens one position later; the values do not depend on the chunks. Only the
logits of `SLICE` positions are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.arrays import IntArray
from pdserve.engine.sampling.logprobs import LogprobsRows, RawLogprobs

SLICE = 256
"""Positions whose logits are computed at once: `[SLICE, V]` float32."""


class PromptLogprobsTable:
    """The rows of the batch that request prompt log-probabilities, and their number of candidates per token."""

    def __init__(self) -> None:
        self._num_top: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._num_top)

    def add(self, row: int, num_top: int) -> None:
        """num_top: most likely tokens to report per position."""
        self._num_top[row] = num_top

    def remove(self, row: int) -> None:
        """Forget a row; no effect if it is not in the table."""
        self._num_top.pop(row, None)

    def of_step(
        self,
        hidden: Tensor,
        rows: IntArray,
        counts: IntArray,
        num_computed: IntArray,
        targets: IntArray,
        num_prompt: IntArray,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> dict[int, LogprobsLists]:
        """Row -> log-probabilities that this step's chunks give.

        hidden `[T, H]`; rows and counts `[S]`, the step's rows and their numbers of tokens; num_computed and num_prompt by row,
        including this step's tokens; targets: the batch's token ids, by row.
        """
        found = {}
        starts = np.cumsum(counts) - counts
        for place, row in enumerate(rows.tolist()):
            num_top = self._num_top.get(row)
            if num_top is None:
                continue
            first = int(num_computed[row] - counts[place])
            count = int(min(counts[place], num_prompt[row] - 1 - first))
            if count > 0:
                start = int(starts[place])
                next_tokens = targets[row, first + 1 : first + 1 + count]
                found[row] = _of_chunk(hidden[start : start + count], next_tokens, num_top, compute_logits)
        return found


def _of_chunk(
    hidden: Tensor, next_tokens: IntArray, num_top: int, compute_logits: Callable[[Tensor], Tensor]
) -> LogprobsLists:
    """hidden `[n, H]`, next_tokens `[n]`."""
    whole = LogprobsLists([], [], [])
    for start in range(0, len(next_tokens), SLICE):
        part = next_tokens[start : start + SLICE]
        rows = LogprobsRows(np.arange(len(part)), np.full(len(part), num_top))
        logits = compute_logits(hidden[start : start + SLICE])
        if not logits.shape[1]:  # a rank above 0, which takes part in computing them
            continue
        tensors = RawLogprobs(rows, None, torch.log_softmax(logits, dim=-1, dtype=torch.float32)).of_tokens(
            torch.from_numpy(part).to(logits.device)
        )
        whole = whole.followed_by(
            LogprobsLists(
                tensors.logprob_token_ids.tolist(),
                tensors.logprobs.tolist(),
                tensors.selected_token_ranks.tolist(),
            )
        )
    return whole
