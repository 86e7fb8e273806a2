"""`ModelDrafter`: drafts the tokens that a smaller model of the same vocabulary predicts.

Its keys and values depend only on tokens: a row keeps those whose tokens are still its sequence's. So nothing is to be done when a
sequence leaves the batch or comes back into another row, or when drafts were wrong; missing keys and values are computed, with at
most `max_num_tokens` tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.drafts.draft_blocks import DraftBlocks
from pdserve.engine.runner.drafts.draft_sampler import DraftSampler, spread
from pdserve.engine.runner.inputs.step_inputs import attention_plans
from pdserve.engine.speculation.drafter import DraftRows
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerBackend
from pdserve.models.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that drafts, with its cache. All tensors are on one device."""

    decoder: DecoderModel
    kv_caches: tuple[Tensor, ...]
    """Per KV cache group, `[num_blocks, Hkv, L, 2, bs, D]`."""
    max_model_len: int
    """Tokens of the longest sequence that it computes."""


class ModelDrafter:
    """A `Drafter` with a `DraftModel`."""

    def __init__(
        self,
        model: DraftModel,
        attention: Sequence[LayerBackend],
        ops: LayerOps,
        *,
        num_rows: int,
        max_num_tokens: int,
        before_layer: Callable[[], None] | None = None,
    ) -> None:
        """attention: over each of the model's caches. num_rows: of the batch. max_num_tokens: of one step of the model."""
        self._model = model.decoder
        self._attention = attention
        self._ops = ops
        self._device = model.kv_caches[0].device
        self._max_model_len = model.max_model_len
        self._max_num_tokens = max_num_tokens
        self._before_layer = before_layer
        self._sampler = DraftSampler(model.decoder.compute_logits, ops)
        num_blocks, block_size = model.kv_caches[0].shape[0], model.kv_caches[0].shape[4]
        self._blocks = DraftBlocks(num_rows, model.max_model_len, num_blocks, block_size)
        self._computed_ids = np.zeros((num_rows, model.max_model_len), np.int64)
        """Tokens for which the keys and values of each row were computed."""
        self._num_computed = np.zeros(num_rows, np.int64)

    @torch.inference_mode()
    def propose(self, wanted: DraftRows) -> Sequence[Sequence[int]]:
        places, counts = self._scheduled(wanted)
        if not len(places):
            return [[] for _ in range(len(wanted.rows))]
        rows = wanted.rows[places]
        known = [
            self._take_known(row, count, wanted) for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
        ]
        hidden = self._forward(rows, counts, torch.from_numpy(np.concatenate(known)).to(self._device))
        # a row of which not all tokens are computed yet has no drafts in this step
        limits = np.minimum(wanted.limits[places], self._max_model_len - wanted.num_tokens[rows])
        limits[self._num_computed[rows] < wanted.num_tokens[rows]] = 0

        def further(going: IntArray, token_ids: Tensor) -> Tensor:
            return self._forward(rows[going], np.ones(len(going), np.int64), token_ids)

        drafts = spread(self._sampler.drafts(hidden, rows, limits, wanted, further), places, len(wanted.rows))
        self._keep(wanted, drafts)
        return drafts

    def _take_known(self, row: int, count: int, wanted: DraftRows) -> IntArray:
        """The row's next tokens, which are about to be computed."""
        columns = slice(int(self._num_computed[row]), int(self._num_computed[row]) + count)
        tokens = wanted.token_ids[row, columns]
        self._computed_ids[row, columns] = tokens
        return tokens

    def _scheduled(self, wanted: DraftRows) -> tuple[IntArray, IntArray]:
        """Places in `wanted.rows`, and tokens of each to compute first, at least 1; single tokens first."""
        places, counts = list[int](), list[int]()
        budget = self._max_num_tokens
        for place, row in enumerate(wanted.rows.tolist()):
            num_tokens = int(wanted.num_tokens[row])
            if num_tokens >= self._max_model_len:
                continue
            self._num_computed[row] = num_known = self._num_known(row, wanted)
            count = min(num_tokens - num_known, budget)
            room = min(num_tokens + int(wanted.limits[place]), self._max_model_len)
            if count <= 0 or not self._blocks.reserve(row, room, wanted.rows):
                continue
            places.append(place)
            counts.append(count)
            budget -= count
        order = np.argsort(np.array(counts) > 1, kind="stable") if counts else np.zeros(0, np.int64)
        return np.array(places, np.int64)[order], np.array(counts, np.int64)[order]

    def _num_known(self, row: int, wanted: DraftRows) -> int:
        """Tokens from the row's first, and without its last, of which there are keys and values."""
        most = min(int(self._num_computed[row]), int(wanted.num_tokens[row]) - 1, self._blocks.num_tokens(row))
        differs = self._computed_ids[row, :most] != wanted.token_ids[row, :most]
        return int(differs.argmax()) if differs.any() else most

    def _forward(self, rows: IntArray, counts: IntArray, token_ids: Tensor) -> Tensor:
        """Hidden states `[R, H]` of the last of each row's next tokens, `[T]`; counts `[R]`, single ones first."""
        computed = self._num_computed[rows]
        ends = np.cumsum(counts)
        starts = ends - counts
        row_of_token = np.repeat(rows, counts)
        positions = np.arange(len(row_of_token)) - np.repeat(starts - computed, counts)
        seq_lens = computed + counts
        batch = AttentionBatch.from_arrays(
            positions=positions,
            slot_mapping=self._blocks.table.slot_mapping(row_of_token, positions),
            query_lens=counts,
            seq_lens=seq_lens,
            block_tables=self._blocks.table.of_step(rows, seq_lens),
            device=self._device,
        )
        batches = [batch] * len(self._attention)  # the same blocks in the cache of each group
        plans = attention_plans(self._attention, batches, self._model.attention_specs)
        inputs = ModelInputs(
            batch,
            plans,
            token_ids=token_ids,
            before_layer=self._before_layer,
            ops=self._ops,
            output_rows=None if len(rows) == len(token_ids) else torch.from_numpy(ends - 1).to(self._device),
        )
        hidden = self._model.forward(inputs)
        self._num_computed[rows] += counts
        return hidden

    def _keep(self, wanted: DraftRows, drafts: list[list[int]]) -> None:
        """Note the drafts. All but the last of a row have keys and values."""
        for row, of_row in zip(wanted.rows.tolist(), drafts, strict=True):
            first = int(wanted.num_tokens[row])
            self._computed_ids[row, first : first + len(of_row)] = of_row
