"""Log-probabilities of prompt tokens: of each token but the first, given the tokens before it.

A chunk of a prompt gives the log-probabilities of the tokens one position later; the values do not depend on the chunks. Only the
logits of a slice of positions are in memory at a time, and each slice shows progress: with a vocabulary of 262,144 tokens a chunk
of 1,000 positions takes seconds on a CPU.
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
"""Positions whose logits are computed at once, at most: `[SLICE, V]` float32."""
_SLICE_BYTES = 64 << 20
"""Of the logits of a slice, about."""


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
        vocab_size: int,
        progress: Callable[[], None] | None = None,
    ) -> dict[int, LogprobsLists]:
        """Row -> log-probabilities that this step's chunks give.

        hidden `[T, H]`; rows and counts `[S]`, the step's rows and their numbers of tokens; num_computed and num_prompt by row,
        including this step's tokens; targets: the batch's token ids, by row; progress: called before each slice.
        """
        found = {}
        size = max(1, min(SLICE, _SLICE_BYTES // (4 * vocab_size)))
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
                found[row] = _of_chunk(
                    hidden[start : start + count], next_tokens, num_top, compute_logits, size, progress
                )
        return found


def _of_chunk(
    hidden: Tensor,
    next_tokens: IntArray,
    num_top: int,
    compute_logits: Callable[[Tensor], Tensor],
    size: int,
    progress: Callable[[], None] | None,
) -> LogprobsLists:
    """hidden `[n, H]`, next_tokens `[n]`; size: positions of a slice."""
    whole = LogprobsLists([], [], [])
    for start in range(0, len(next_tokens), size):
        if progress is not None:
            progress()
        part = next_tokens[start : start + size]
        rows = LogprobsRows(np.arange(len(part)), np.full(len(part), num_top))
        logits = compute_logits(hidden[start : start + size])
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
