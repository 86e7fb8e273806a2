"""`StepInputs`: everything that one step reads on the device, staged in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.device.staging_buffer import StagingBuffer
from pdserve.engine.runner.inputs.block_table import NO_SLOT, BlockTable
from pdserve.engine.runner.inputs.device_batch import DeviceBlockTable, NewestTokens
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.engine.runner.inputs.sampled_inputs import SampledInputs, SampledPlan
from pdserve.kernels.attention.attention_batch import AttentionBatch, PlanArray, StepLengths
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.layer_plans import LayerBackend, LayerPlan, LayerSpec, plan_of
from pdserve.kernels.state.state_backend import StateBackend

_GroupArrays = Mapping[str, NDArray[Any]]
"""`LayerBackend.plan_arrays` of one KV cache group."""
_FROM_DEVICE = -1
"""Token id of a token that the device has sampled and the host has not read yet."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes to which a step is padded, so that it has the launches of others."""

    num_tokens: int
    most_chunks: int | None = None
    """Chunks of prompts that the step has at most, and no decode row; None: it has decode rows only."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's inputs."""

    batches: Sequence[AttentionBatch]
    """One per KV cache group."""
    token_ids: Tensor
    """`[T]` int64."""
    row_of_token: IntArray
    positions: IntArray
    """`[T]` each, on the host: the row of the batch, and the token's place in its sequence; 0 of padding."""
    sampled: SampledInputs | None
    """None if no row is sampled."""

    def output_rows(self) -> Tensor | None:
        """`[N]`: the tokens after which the step samples; None: after each."""
        if self.sampled is None:
            return self.token_ids.new_empty(0)
        ends = self.sampled.ends
        return None if len(ends) == len(self.token_ids) else ends


def attention_plans(
    attention: Sequence[LayerBackend], batches: Sequence[AttentionBatch], specs: Sequence[Sequence[LayerSpec]]
) -> dict[LayerSpec, LayerPlan]:
    """Spec -> its plan for a step. attention, batches, specs: per KV cache group."""
    groups = zip(attention, batches, specs, strict=True)
    return {spec: plan_of(backend, batch, spec) for backend, batch, of_group in groups for spec in of_group}


@dataclass(frozen=True, slots=True)
class _StepArrays:
    """A step on the host. S rows, T tokens."""

    rows: IntArray
    counts: IntArray
    """`[S]`: tokens of each row."""
    seq_lens: IntArray
    row_of_token: IntArray
    positions: IntArray
    """`[T]`: places of the tokens in their sequences."""
    rotary_positions: IntArray
    """See `AttentionBatch.positions`."""
    token_ids: IntArray
    is_pending: bool
    """True if a token id is `_FROM_DEVICE`."""
    new_tails: IntArray
    """See `AttentionBatch.new_tails`."""

    num_tokens: int
    """Tokens at the beginning that are the batch's; the others are padding."""
    num_decodes: int
    """Rows at the beginning with one token each."""
    most_chunks: int | None
    """See `AttentionBatch.most_chunks`."""
    tentative: Sequence[int]
    """See `AttentionBatch.tentative`."""

    @classmethod
    def of(
        cls, batch: InputBatch, rows: IntArray, counts: IntArray, shape: StepShape | None, tentative: Sequence[int]
    ) -> _StepArrays:
        """shape: None for no padding."""
        computed = batch.num_computed[rows]
        row_of_token = np.repeat(rows, counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(row_of_token)) - np.repeat(starts - computed, counts)
        seq_lens = computed + counts
        token_ids = batch.token_ids[row_of_token, positions]
        is_pending = batch.num_pending > 0 and bool(batch.is_pending[rows].any())
        if is_pending:
            token_ids[positions >= batch.num_tokens[row_of_token]] = _FROM_DEVICE
        new_tails = batch.take_new_tails(rows, counts, seq_lens)
        rotary = batch.mrope.of_step(rows, counts, row_of_token, positions) if len(batch.mrope) else positions
        num_decodes, num_tokens = int(np.count_nonzero(counts == 1)), len(row_of_token)
        most_chunks = None if shape is None else shape.most_chunks
        missing = 0 if shape is None else shape.num_tokens - num_tokens
        # Padding is at position 0 of sequences of length 0, in row 0 of the batch: a sequence for each decode row, or a chunk and
        # sequences without tokens, so that the step has `most_chunks` and one.
        if most_chunks is None:
            num_decodes += missing
            counts_of_padding = np.full(missing, 1)
        else:
            counts_of_padding = np.zeros(most_chunks + 1 - len(rows), np.int64)
            counts_of_padding[0] = missing

        def padded(array: IntArray, fill: IntArray | int, padding: int = len(counts_of_padding)) -> IntArray:
            return np.append(array, np.full(padding, fill)) if padding else array

        return cls(
            rows=padded(rows, 0),
            counts=padded(counts, counts_of_padding),
            seq_lens=padded(seq_lens, 0),
            row_of_token=padded(row_of_token, 0, missing),
            positions=padded(positions, 0, missing),
            rotary_positions=padded(rotary, 0, missing),
            token_ids=padded(token_ids, 0, missing),
            is_pending=is_pending,
            new_tails=new_tails,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            most_chunks=most_chunks,
            tentative=tentative,
        )

    def slots(self, table: BlockTable) -> IntArray:
        """See `AttentionBatch.slot_mapping`."""
        slots = table.slot_mapping(self.row_of_token, self.positions)
        if self.num_tokens < len(slots):
            slots[self.num_tokens :] = NO_SLOT
        return slots


class StepInputBuilder:
    """Makes the inputs of a step from the batch. On a CPU they share the batch's memory."""

    def __init__(
        self,
        config: EngineConfig,
        batch: InputBatch,
        device: torch.device,
        staging: StagingBuffer,
        vocab_size: int,
        attention: Sequence[LayerBackend],
        specs: Sequence[Sequence[LayerSpec]],
        *,
        packs_parameters: bool,
    ) -> None:
        """attention and specs: per KV cache group. packs_parameters: True if the device samples, False if numpy does."""
        self._batch = batch
        self._device = device
        self._staging = staging
        self._vocab_size = vocab_size
        self._attention = attention
        self._specs = specs
        self._packs_parameters = packs_parameters
        rows, max_blocks = config.max_num_seqs, config.blocks_for(config.max_model_len)
        self._newest = NewestTokens(rows, device)
        self._tables: list[DeviceBlockTable] = []
        if device.type != "cpu":
            self._tables = [
                DeviceBlockTable(rows, max_blocks, config.block_size, device) for _ in range(len(batch.block_tables))
            ]
            for table in batch.block_tables:
                table.keep_changes()

    def keep_newest(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep the tokens that these rows sampled, for a step that begins before the host has read them; both `[N]`."""
        self._newest.put(rows, token_ids)

    def build(
        self,
        rows: IntArray,
        counts: IntArray,
        complete: IntArray,
        shape: StepShape | None,
        tentative: Sequence[int] = (),
    ) -> StepInputs:
        """rows and counts `[S]`: tokens of each row, single ones first; complete `[C]`: places of the rows to sample.

        shape: to which the step is padded; None: to none. tentative: places, see `AttentionBatch.tentative`.
        """
        step = _StepArrays.of(self._batch, rows, counts, shape, tentative)
        plan = SampledPlan.of(self._batch, rows, counts, complete) if len(complete) else None
        return self._staged(step, plan) if self._tables else self._shared(step, plan)

    def _shared(self, step: _StepArrays, plan: SampledPlan | None) -> StepInputs:
        """For a CPU."""
        lists = self._plan_arrays(step)
        plan_arrays = _placed(lists, self._staging.upload(_flat(lists)))
        batches = [
            AttentionBatch.from_arrays(
                positions=step.rotary_positions,
                slot_mapping=step.slots(table),
                query_lens=step.counts,
                seq_lens=step.seq_lens,
                block_tables=table.of_step(step.rows, step.seq_lens),
                new_tails=step.new_tails,
                most_chunks=step.most_chunks,
                tentative=step.tentative,
                plan_arrays=of_group,
                device=self._device,
            )
            for table, of_group in zip(self._batch.block_tables, plan_arrays, strict=True)
        ]
        token_ids = torch.from_numpy(step.token_ids)
        if step.is_pending:
            token_ids = self._newest.fill(token_ids, torch.from_numpy(step.row_of_token))
        if plan is None:
            return StepInputs(batches, token_ids, step.row_of_token, step.positions, None)
        arrays = SampledInputs.arrays(plan, is_packed=self._packs_parameters)
        sampled = self._sampled(plan, self._staging.upload(arrays))
        return StepInputs(batches, token_ids, step.row_of_token, step.positions, sampled)

    def _staged(self, step: _StepArrays, plan: SampledPlan | None) -> StepInputs:
        """For a device: one copy."""
        lists = self._plan_arrays(step)
        starts = np.zeros(len(step.counts) + 1, np.int64)
        step.counts.cumsum(out=starts[1:])
        parts: list[list[NDArray[Any]]] = [
            [step.token_ids, step.rotary_positions, starts, step.seq_lens, step.rows, step.new_tails],
            [step.slots(table) for table in self._batch.block_tables],
            [array for table in self._batch.block_tables for array in table.take_changes()],
            _flat(lists),
            [step.row_of_token] if step.is_pending else [],
            [] if plan is None else SampledInputs.arrays(plan, is_packed=self._packs_parameters),
        ]
        there = iter(self._staging.upload([array for part in parts for array in part]))
        first, slots, changes, lists_there, row_of_token, sampled = ([next(there) for _ in part] for part in parts)
        token_ids, positions, starts_there, seq_lens, rows, new_tails = first
        plan_arrays = _placed(lists, lists_there)
        if step.is_pending:
            token_ids = self._newest.fill(token_ids, row_of_token[0])
        counts: list[int] = step.counts.tolist()
        longest = int(step.seq_lens.max())
        batches = []
        for group, table in enumerate(self._tables):
            table.put(changes[2 * group], changes[2 * group + 1])
            batches.append(
                AttentionBatch(
                    positions=positions,
                    slot_mapping=slots[group],
                    query_start_loc=starts_there,
                    seq_lens=seq_lens,
                    block_tables=table.of_step(rows, seq_lens, longest),
                    num_decodes=step.num_decodes,
                    max_query_len=max(counts),
                    max_seq_len=longest,
                    query_start_loc_cpu=torch.from_numpy(starts),
                    seq_lens_cpu=torch.from_numpy(step.seq_lens),
                    new_tails=new_tails,
                    most_chunks=step.most_chunks,
                    tentative=step.tentative,
                    plan_arrays=plan_arrays[group],
                )
            )
        of_rows = None if plan is None else self._sampled(plan, sampled)
        return StepInputs(batches, token_ids, step.row_of_token, step.positions, of_rows)

    def _plan_arrays(self, step: _StepArrays) -> list[_GroupArrays]:
        """Per KV cache group; a back end of another package may lack the method."""
        lengths = StepLengths(step.counts, step.seq_lens, step.num_decodes, step.most_chunks)
        return [
            {}
            if isinstance(backend, StateBackend) or not hasattr(backend, "plan_arrays")
            else backend.plan_arrays(lengths, [spec for spec in specs if isinstance(spec, AttentionSpec)])
            for backend, specs in zip(self._attention, self._specs, strict=True)
        ]

    def _sampled(self, plan: SampledPlan, tensors: Sequence[Tensor]) -> SampledInputs:
        return SampledInputs.of(plan, tensors, self._vocab_size, is_packed=self._packs_parameters)


def _flat(lists: Sequence[_GroupArrays]) -> list[NDArray[Any]]:
    return [array for of_group in lists for array in of_group.values()]


def _placed(lists: Sequence[_GroupArrays], there: Iterable[Tensor]) -> list[dict[str, PlanArray]]:
    """there: a tensor for each of `_flat(lists)`."""
    tensors = iter(there)
    return [{name: PlanArray(array, next(tensors)) for name, array in of_group.items()} for of_group in lists]
