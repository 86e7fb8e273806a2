"""`EncoderDecoderInputs`: a step of a model with an encoder, cut into what is encoded and what is decoded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.inputs.block_table import BlockTable
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.make_attention import make_attention, make_cross_attention
from pdserve.models.encoder_decoder.encoder_decoder_config import EncoderDecoderConfig
from pdserve.models.encoder_decoder_step import DecoderTokens, EncoderDecoderStep, EncoderTokens
from pdserve.models.model_inputs import ModelInputs


class EncoderDecoderInputs:
    """Three back ends over one cache, since a step has plans of three batches at once."""

    def __init__(
        self, config: EncoderDecoderConfig, batch: InputBatch, backend: str, kv_cache: Tensor, dtype: torch.dtype
    ) -> None:
        """backend: the setting `attention_backend`. Raises: AttentionBackendError."""
        self._batch = batch
        self._block_size = kv_cache.shape[4]
        self._device = kv_cache.device
        self._self_spec, self._cross_spec = config.self_attention_spec, config.cross_attention_spec
        self._self_attention = make_attention(backend, kv_cache, dtype)
        self._cross_attention = make_cross_attention(backend, kv_cache, dtype)
        self._storing = make_cross_attention(backend, kv_cache, dtype)

    @classmethod
    def of_model(
        cls, config: EngineConfig, model: DecoderModel, batch: InputBatch, kv_cache: Tensor
    ) -> EncoderDecoderInputs | None:
        """None for a model without an encoder. Raises: AttentionBackendError."""
        dimensions = getattr(model, "config", None)
        if not isinstance(dimensions, EncoderDecoderConfig):
            return None
        return cls(dimensions, batch, config.attention_backend, kv_cache, model.dtype)

    def placed(self, inputs: ModelInputs, rows: IntArray, counts: IntArray) -> ModelInputs:
        """A step's inputs with its two parts. rows and counts `[S]`: tokens of each row, single ones first; none of them counts as
        computed yet."""
        step = _StepRows.of(self._batch, rows, counts)
        parts = EncoderDecoderStep(self._encoded(step), self._decoded(step, inputs.batch.new_tails))
        return replace(inputs, encoder_decoder=parts)

    def _encoded(self, step: _StepRows) -> EncoderTokens | None:
        places = np.flatnonzero(step.is_encoded)
        if not len(places):
            return None
        lengths, slots, table = step.num_tokens[places], step.num_slots[places], self._table
        slot_rows, slot_places = _runs(step.rows[places], np.zeros_like(slots), slots)
        _, token_rows = _runs(places, step.starts[places], lengths)
        batch = AttentionBatch.from_arrays(
            positions=slot_places,
            slot_mapping=table.slot_mapping(slot_rows, slot_places),
            query_lens=slots,
            seq_lens=slots,
            block_tables=table.of_step(step.rows[places], slots),
            new_tails=np.zeros(0, np.int64),
            device=self._device,
        )
        _, among_slots = _runs(places, np.cumsum(slots) - slots, lengths)
        plan = self._storing.plan(batch, self._cross_spec)
        sounds = tuple(
            feature.data for row in step.rows[places].tolist() for feature in self._batch.mm_features.get(row, ())
        )
        return EncoderTokens(
            self._placed(token_rows), tuple(lengths.tolist()), self._placed(among_slots), len(slot_places), plan, sounds
        )

    def _decoded(self, step: _StepRows, new_tails: Tensor | None) -> DecoderTokens | None:
        """Sequences with one token first; then those whose encoder read one token, whose tokens the cross attention takes one by
        one, as it takes sequences with one token."""
        places = np.flatnonzero(step.num_decoded)
        if not len(places):
            return None
        is_chunk = step.num_decoded[places] > 1
        order = np.where(is_chunk, 1 + (step.num_tokens[places] > 1), 0)
        places = places[np.argsort(order, kind="stable")]
        rows, counts, table = step.rows[places], step.num_decoded[places], self._table
        ends = step.computed[places] + step.counts[places]
        first_blocks = step.num_slots[places] // self._block_size
        row_of_token, positions = _runs(rows, ends - counts, counts)
        seq_lens = ends - step.num_slots[places]
        own_positions = positions - np.repeat(step.num_slots[places], counts)
        batch = AttentionBatch.from_arrays(
            positions=own_positions,
            slot_mapping=table.slot_mapping(row_of_token, positions),
            query_lens=counts,
            seq_lens=seq_lens,
            block_tables=table.part(rows, first_blocks, seq_lens),
            device=self._device,
        )
        # decode rows stay at their places; those that began in this step come after them
        began = np.flatnonzero((counts == 1) & (step.counts[places] > 1))
        if new_tails is not None:
            new_tails = torch.cat((new_tails, self._placed(began)))
        batch = replace(batch, new_tails=new_tails)
        token_rows = _runs(places, (step.starts + step.counts)[places] - counts, counts)[1]
        is_all = len(token_rows) == int(step.counts.sum()) and bool((np.diff(token_rows) > 0).all())
        return DecoderTokens(
            rows=None if is_all else self._placed(token_rows),
            positions=batch.positions,
            self_plan=self._self_attention.plan(batch, self._self_spec),
            cross_plan=self._cross_attention.plan(self._cross_batch(step, places, counts), self._cross_spec),
        )

    def _cross_batch(self, step: _StepRows, places: IntArray, counts: IntArray) -> AttentionBatch:
        """The same tokens in the same order, over the encoder's blocks.

        A chunk counts as the last tokens of the sequence that it attends to, so it is cut into pieces that are shorter.
        """
        most = np.where(counts > 1, np.maximum(step.num_tokens[places] - 1, 1), 1)
        pieces = -(-counts // most)
        of_piece = np.repeat(np.arange(len(places)), pieces)
        number = np.arange(len(of_piece)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        query_lens = np.minimum(most[of_piece], counts[of_piece] - number * most[of_piece])
        lengths = step.num_tokens[places][of_piece]
        num_queries = int(counts.sum())
        return AttentionBatch.from_arrays(
            positions=np.zeros(num_queries, np.int64),
            slot_mapping=np.zeros(num_queries, np.int64),
            query_lens=query_lens,
            seq_lens=lengths,
            block_tables=self._table.of_step(step.rows[places][of_piece], lengths),
            # the blocks are complete, and shared with other sequences
            new_tails=np.zeros(0, np.int64),
            device=self._device,
        )

    @property
    def _table(self) -> BlockTable:
        return self._batch.block_tables[0]

    def _placed(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(frozen=True, slots=True)
class _StepRows:
    """S rows of a step; all `[S]`."""

    rows: IntArray
    counts: IntArray
    computed: IntArray
    """Tokens before the step's."""
    starts: IntArray
    """The row's first token in the step."""
    num_tokens: IntArray
    """Tokens that the encoder reads."""
    num_slots: IntArray
    num_decoded: IntArray
    """Tokens of the decoder in the step."""
    is_encoded: NDArray[np.bool_]

    @classmethod
    def of(cls, batch: InputBatch, rows: IntArray, counts: IntArray) -> _StepRows:
        """Raises: RuntimeError for a part of an encoder's prompt."""
        computed, num_slots = batch.num_computed[rows], batch.encoder_slots[rows]
        ends = computed + counts
        is_encoded = computed < num_slots
        if (is_encoded & ((computed > 0) | (ends < num_slots))).any():
            raise RuntimeError("a part of an encoder's prompt is scheduled")
        num_decoded = ends - np.maximum(computed, num_slots)
        starts = np.cumsum(counts) - counts
        return cls(rows, counts, computed, starts, batch.encoder_tokens[rows], num_slots, num_decoded, is_encoded)


def _runs(values: IntArray, firsts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """(each of `values`, repeated by its count; for each copy its `firsts` plus 0, 1, ...)."""
    starts = np.cumsum(counts) - counts
    return np.repeat(values, counts), np.arange(int(counts.sum())) - np.repeat(starts - firsts, counts)
