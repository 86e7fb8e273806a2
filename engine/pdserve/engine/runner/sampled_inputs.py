"""`SampledInputs`: the rows of a step that are sampled, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.runner.input_batch import InputBatch
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import SamplingMetadata
from pdserve.kernels.sampled_rows import PackedRows, SamplingStages, packed


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """The rows whose last known token a step computes: a token is sampled for each of their sequences."""

    rows: IntArray
    """`[C]` rows of the batch."""
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
    """True if the host does not know the tokens before, on which rules depend."""

    @classmethod
    def of(cls, batch: InputBatch, rows: IntArray, counts: IntArray, complete: IntArray) -> SampledPlan:
        """rows and counts `[S]`: the step's; complete `[C]`: places in them."""
        sampled, ends = rows[complete], np.cumsum(counts)[complete] - 1
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
        metadata = batch.sampling_parameters(rows_of_tokens, np.arange(len(places)) - firsts[places])
        return cls(sampled, req_ids, num_sequences, ends, places, batch.with_rules(metadata, rows_of_tokens), False)

    @property
    def firsts(self) -> IntArray:
        """`[C]`: the first sampled token of each row."""
        return np.cumsum(self.num_sequences) - self.num_sequences

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
    """None on a processor that samples with numpy."""

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
