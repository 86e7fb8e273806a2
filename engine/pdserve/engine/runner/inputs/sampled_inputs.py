"""`SampledInputs`: the rows of a step that are sampled, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import SamplingMetadata
from pdserve.engine.speculation.confirmed_runs import NO_DRAFT
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed


@dataclass(frozen=True, slots=True)
class DraftedRuns:
    """Positions of the sampled rows of a step with drafts. S' rows, C positions in all."""

    lengths: IntArray
    """`[S']`: positions of each row."""
    offsets: IntArray
    """`[C]`: number of drafts before each position."""
    drafts: IntArray
    """`[C]`: the draft after each position, `NO_DRAFT` for none."""

    @classmethod
    def of(cls, batch: InputBatch, sampled: IntArray) -> DraftedRuns:
        """sampled `[S']`: rows of the batch."""
        lengths = batch.num_drafts[sampled] + 1
        starts = np.cumsum(lengths) - lengths
        offsets = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        rows = np.repeat(sampled, lengths)
        columns = np.minimum(batch.num_tokens[rows] + offsets, batch.token_ids.shape[1] - 1)
        is_last = offsets == np.repeat(lengths, lengths) - 1
        return cls(lengths, offsets, np.where(is_last, NO_DRAFT, batch.token_ids[rows, columns]))

    @property
    def firsts(self) -> IntArray:
        """`[S']`: the first position of each row."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """The rows whose last known token a step computes: a token is sampled for each of their sequences, and after each of their
    drafts."""

    rows: IntArray
    """`[C]` rows of the batch; one with k drafts stands here k + 1 times in a row."""
    req_ids: list[str]
    num_sequences: IntArray
    """`[C]`: tokens of each row, 1 but at the end of a prompt of several sequences."""
    ends: IntArray
    """`[C]`: rows of the step's hidden states."""
    places: IntArray | None
    """`[N]`: rows of the logits by sampled token; None: one token per row."""
    metadata: SamplingMetadata
    """Parameters and rules of the N tokens; without rules if `is_pending`."""
    is_pending: bool
    """True if the host does not have the preceding tokens, on which rules depend."""
    runs: DraftedRuns | None = None
    """None: no row has drafts."""

    @classmethod
    def of(cls, batch: InputBatch, rows: IntArray, counts: IntArray, complete: IntArray) -> SampledPlan:
        """rows and counts `[S]`: the step's; complete `[S']`: places in them."""
        sampled, ends = rows[complete], np.cumsum(counts)[complete] - 1
        if batch.num_drafts[sampled].any():
            return cls._with_drafts(batch, sampled, ends)
        num_sequences = batch.num_sequences[sampled]
        req_ids = [batch.req_ids[row] for row in sampled.tolist()]
        if (num_sequences == 1).all():
            metadata = batch.sampling_parameters(sampled)
            if is_pending := batch.num_pending > 0 and bool(batch.is_pending[sampled].any()):
                return cls(sampled, req_ids, num_sequences, ends, None, metadata, is_pending)
            return cls(sampled, req_ids, num_sequences, ends, None, batch.with_rules(metadata, sampled), is_pending)
        firsts = np.cumsum(num_sequences) - num_sequences
        places = np.repeat(np.arange(len(sampled)), num_sequences)
        rows_of_tokens = sampled[places]
        metadata = batch.sampling_parameters(rows_of_tokens, offsets=np.arange(len(places)) - firsts[places])
        return cls(sampled, req_ids, num_sequences, ends, places, batch.with_rules(metadata, rows_of_tokens), False)

    @classmethod
    def _with_drafts(cls, batch: InputBatch, sampled: IntArray, ends: IntArray) -> SampledPlan:
        """sampled, ends `[S']`: rows of the batch, and of the hidden states of their last tokens. None is pending."""
        runs = DraftedRuns.of(batch, sampled)
        rows = np.repeat(sampled, runs.lengths)
        ends = np.repeat(ends - runs.lengths + 1, runs.lengths) + runs.offsets
        num_sequences = batch.num_sequences[rows]
        req_ids = [batch.req_ids[row] for row in rows.tolist()]
        places, row_of_token, drafts, indexes = None, rows, runs.offsets, np.zeros_like(rows)
        if (num_sequences != 1).any():
            firsts = np.cumsum(num_sequences) - num_sequences
            places = np.repeat(np.arange(len(rows)), num_sequences)
            row_of_token, drafts = rows[places], runs.offsets[places]
            indexes = np.arange(len(places)) - firsts[places]
        metadata = batch.sampling_parameters(row_of_token, drafts, indexes)
        metadata = batch.with_rules(metadata, row_of_token, drafts)
        return cls(rows, req_ids, num_sequences, ends, places, metadata, False, runs)

    @property
    def firsts(self) -> IntArray:
        """`[C]`: the first sampled token of each row."""
        return np.cumsum(self.num_sequences) - self.num_sequences

    @property
    def offset_of_token(self) -> IntArray | None:
        """`[N]`: the number of drafts before each sampled token; None: no row has drafts."""
        if self.runs is None or self.places is None:
            return None if self.runs is None else self.runs.offsets
        return self.runs.offsets[self.places]

    @property
    def row_of_token(self) -> IntArray:
        """`[N]`: the row of the batch of each sampled token."""
        return self.rows if self.places is None else self.rows[self.places]


@dataclass(frozen=True, slots=True)
class SampledInputs:
    """A `SampledPlan` with its tensors."""

    plan: SampledPlan
    rows: Tensor
    ends: Tensor
    places: Tensor | None
    placed: PlacedArrays
    """The arrays of the plan's metadata."""
    packed_rows: PackedRows | None
    """None on a CPU that samples with numpy."""

    @staticmethod
    def arrays(plan: SampledPlan, *, is_packed: bool) -> list[NDArray[Any]]:
        """Arrays to copy to the device. is_packed: with the parameters."""
        places = [] if plan.places is None else [plan.places]
        parameters = [packed(plan.metadata)] if is_packed else []
        return [plan.rows, plan.ends, *parameters, *places, *plan.metadata.arrays()]

    @classmethod
    def of(cls, plan: SampledPlan, tensors: Sequence[Tensor], vocab_size: int, *, is_packed: bool) -> SampledInputs:
        """tensors: copies of `arrays`."""
        rows, ends, *others = tensors
        parameters = others.pop(0) if is_packed else None
        places = None if plan.places is None else others.pop(0)
        packed_rows = None
        if parameters is not None:
            packed_rows = PackedRows(parameters, SamplingStages.of(plan.metadata, vocab_size))
        return cls(plan, rows, ends, places, PlacedArrays().add(plan.metadata.arrays(), others), packed_rows)
