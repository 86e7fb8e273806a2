"""Penalties for tokens that a sequence already contains.

Penalties are sparse and keep no history: tokens are read from the batch, so a sequence that returns after a preemption, or comes
from prefill, gets the same penalties. The cost of a penalty is proportional to the number of the sequence's tokens, not to the
vocabulary; sequences without penalties cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.arrays import FloatArray, IntArray
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sparse_indices import SparseIndices

MAX_REPETITION = 2.0**64
"""Largest repetition penalty, and the inverse of the smallest. Others are clamped, so that float32 logits stay finite."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of one step's rows. A token has as many entries as occurrences in its sequence. None: no row has the penalty."""

    repeated: SparseIndices | None = None
    """Tokens of prompt and output."""
    repetition: FloatArray | None = None
    """`[E]`, one for each entry of `repeated`."""
    in_output: SparseIndices | None = None
    frequency: FloatArray | None = None
    """`[E]`, one for each entry of `in_output`."""
    presence: FloatArray | None = None
    """`[E]`, as `frequency`."""

    def arrays(self) -> list[NDArray[Any]]:
        """Arrays that `apply` needs on the logits' device."""
        indices = [part for part in (self.repeated, self.in_output) if part is not None]
        factors = (self.repetition, self.frequency, self.presence)
        return [*(array for part in indices for array in part.arrays()), *(one for one in factors if one is not None)]

    def apply(self, logits: Tensor, placed: PlacedArrays) -> None:
        """logits `[N, V]`; changed in place: repetition, then frequency, then presence."""
        if self.repeated is not None and self.repetition is not None:
            index, factor = self.repeated.index(placed), placed(self.repetition)
            values = logits[index]
            # all logits are read before the first is written, so repeated entries of a token write the same value
            logits[index] = torch.where(values > 0, values / factor, values * factor)
        if self.in_output is not None and self.frequency is not None and self.presence is not None:
            index = self.in_output.index(placed)
            logits.index_put_(index, -placed(self.frequency), accumulate=True)
            logits[index] = logits[index] - placed(self.presence)


class PenaltyTable:
    """The penalties of the sequences in the batch, by row."""

    def __init__(self, num_rows: int) -> None:
        self._repetition = np.ones(num_rows, dtype=np.float32)
        self._frequency = np.zeros(num_rows, dtype=np.float32)
        self._presence = np.zeros(num_rows, dtype=np.float32)
        self._knows_prompt = np.ones(num_rows, dtype=np.bool_)

    def set(self, row: int, params: SamplingParams, *, knows_prompt: bool = True) -> None:
        """knows_prompt: False if the prompt's token ids are placeholders, which are not penalised."""
        self._knows_prompt[row] = knows_prompt
        self._repetition[row] = min(MAX_REPETITION, max(1 / MAX_REPETITION, params.repetition_penalty))
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty

    def of_step(self, rows: IntArray, lengths: IntArray, token_ids: IntArray, num_prompt: IntArray) -> Penalties | None:
        """Penalties for logits whose row i is the batch's row `rows[i]` after `lengths[i]` tokens.

        token_ids, num_prompt: the batch's, by its rows.
        """
        repeats = np.flatnonzero(self._repetition[rows] != 1)
        counts = np.flatnonzero((self._frequency[rows] != 0) | (self._presence[rows] != 0))
        if not len(repeats) and not len(counts):
            return None
        repeated = _tokens_of(repeats, rows, token_ids, np.where(self._knows_prompt, 0, num_prompt), lengths)
        in_output = _tokens_of(counts, rows, token_ids, num_prompt, lengths)
        return Penalties(
            repeated=repeated,
            repetition=None if repeated is None else self._repetition[rows[repeated.rows]],
            in_output=in_output,
            frequency=None if in_output is None else self._frequency[rows[in_output.rows]],
            presence=None if in_output is None else self._presence[rows[in_output.rows]],
        )


def _tokens_of(
    places: IntArray, rows: IntArray, token_ids: IntArray, first: IntArray, end: IntArray
) -> SparseIndices | None:
    """Tokens `[first, end)` of the batch's rows `rows[places]`, as entries of the logits' rows `places`.

    first: by rows of the batch; end: by rows of the logits.
    """
    if not len(places):
        return None
    counts = end[places] - first[rows[places]]
    entry_places = np.repeat(places, counts)
    starts = np.cumsum(counts) - counts
    columns = np.arange(len(entry_places)) - np.repeat(starts - first[rows[places]], counts)
    return SparseIndices(entry_places, token_ids[rows[entry_places], columns])
