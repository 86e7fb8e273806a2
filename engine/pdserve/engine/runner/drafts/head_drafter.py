"""`HeadDrafter`: drafts the tokens that the model's own draft head predicts.

The head has a KV cache group, with entries at the positions of the model's. Each step writes the entries of the tokens that it
computes (`fill`), also on a prefill worker, whose blocks a decode worker receives. Entries of drafts come after them, and the steps
that confirm or replace the drafts write these again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.arrays import IntArray
from pdserve.engine.runner.drafts.draft_sampler import DraftSampler, spread
from pdserve.engine.runner.inputs.block_table import BlockTable
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.engine.runner.inputs.sampled_inputs import SampledInputs, SampledPlan
from pdserve.engine.sampling.sampler import Sampled, TokenSampler
from pdserve.engine.speculation.drafter import DraftRows
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerBackend, LayerSpec, plan_of
from pdserve.models.decoder import Decoder
from pdserve.models.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step whose entries `fill` is to write."""

    batch: AttentionBatch
    """Of the head's KV cache group."""
    hidden: Tensor
    """`[T, H]`, what entries take of the model."""
    row_of_token: IntArray
    """`[T]`, of the batch."""
    positions: IntArray
    """`[T]`: places of the tokens in their sequences."""


@dataclass(frozen=True, slots=True)
class _Predictions:
    """What the head predicts after the positions that a step has sampled. C positions."""

    plan: SampledPlan
    num_known: IntArray
    """`[C]`: tokens of each row before the step's were appended."""
    normed: Tensor
    passed: Tensor
    """`[C, H]` each, see `DraftHead.forward`."""

    def places(self, wanted: DraftRows) -> IntArray:
        """`[R]`: for each wanted row, the place after its last confirmed token; -1 if there is none."""
        firsts: dict[int, int] = {}
        for place in range(len(self.plan.rows) - 1, -1, -1):
            firsts[int(self.plan.rows[place])] = place
        lengths = np.bincount(self.plan.rows, minlength=len(wanted.num_tokens))
        found = np.full(len(wanted.rows), -1, np.int64)
        for number, row in enumerate(wanted.rows.tolist()):
            if (first := firsts.get(row)) is not None:
                num_new = int(wanted.num_tokens[row] - self.num_known[first])
                if 1 <= num_new <= lengths[row]:
                    found[number] = first + num_new - 1
        return found


class HeadDrafter:
    """A `Drafter` with the draft head of a model."""

    def __init__(
        self,
        model: Decoder,
        attention: LayerBackend,
        specs: Sequence[LayerSpec],
        ops: LayerOps,
        sampler: TokenSampler | None,
        *,
        drafts: bool,
        before_layer: Callable[[], None] | None = None,
    ) -> None:
        """attention: over the cache of the head's group, whose specs are `specs`. sampler: default: `Sampler`.

        drafts: False on a worker that only fills the cache.
        """
        if model.draft_head is None:
            raise ValueError("the model has no draft head")
        self._model, self._head = model, model.draft_head
        self._attention = attention
        self._specs = specs
        self._ops = ops
        self._sampler = DraftSampler(model.compute_draft_logits, ops, sampler)
        self._drafts = drafts
        self._before_layer = before_layer
        self._last: tuple[_Predictions, BlockTable] | None = None
        """Of the last step, until `propose` has taken them."""

    @property
    def needs_layer_inputs(self) -> bool:
        """True if `taken` needs `ModelInputs.layer_inputs` of a step."""
        return bool(self._head.tapped_layers)

    def taken(self, hidden: Tensor, layer_inputs: Sequence[Tensor]) -> Tensor:
        """What the step's entries take of the model, `[T, H]`. hidden `[T, H]`: its last hidden states."""
        return self._head.taken(hidden, layer_inputs)

    def fill(self, step: FilledStep, batch: InputBatch, sampled: tuple[SampledInputs, Sampled] | None) -> None:
        """Queue the entries of a step's tokens. sampled: the tokens after the last of each complete row; None: none is complete.

        Called before the step's tokens are appended to the batch.
        """
        device = step.hidden.device
        columns = np.minimum(step.positions + 1, batch.token_ids.shape[1] - 1)
        token_ids = torch.from_numpy(batch.token_ids[step.row_of_token, columns]).to(device)
        self._last, output_rows = None, token_ids.new_empty(0)
        if sampled is not None:
            inputs, tokens = sampled
            firsts = torch.from_numpy(inputs.plan.firsts).to(device)
            # a row whose rules leave no token has any
            token_ids.index_put_((inputs.ends,), tokens.token_ids[firsts].clamp(min=0))
            if self._drafts:
                output_rows = inputs.ends
        normed, passed = self._forward(step.batch, token_ids, step.hidden, output_rows)
        if sampled is not None and self._drafts:
            plan = sampled[0].plan
            found = _Predictions(plan, batch.num_tokens[plan.rows], normed, passed)
            self._last = found, batch.block_tables[-1]

    @torch.inference_mode()
    def propose(self, wanted: DraftRows) -> Sequence[Sequence[int]]:
        last, self._last = self._last, None
        if last is None:
            return [[] for _ in range(len(wanted.rows))]
        predictions, table = last
        found = predictions.places(wanted)
        places = np.flatnonzero(found >= 0)
        rows, there = wanted.rows[places], found[places]
        positions = wanted.num_tokens[rows] - 2
        # entries of drafts have room in the blocks that the sequence has
        limits = np.minimum(wanted.limits[places], table.num_slots(rows) - positions)
        device = predictions.normed.device
        chosen = torch.from_numpy(there).to(device)
        passed = predictions.passed[chosen]

        def further(going: IntArray, token_ids: Tensor) -> Tensor:
            positions[going] += 1
            at, of_rows = positions[going], torch.from_numpy(going).to(device)
            batch = AttentionBatch.from_arrays(
                positions=at,
                slot_mapping=table.slot_mapping(rows[going], at),
                query_lens=np.ones(len(going), np.int64),
                seq_lens=at + 1,
                block_tables=table.of_step(rows[going], at + 1),
                device=device,
            )
            normed, passed[of_rows] = self._forward(batch, token_ids.clamp(min=0), passed[of_rows], None)
            return normed

        drafts = self._sampler.drafts(predictions.normed[chosen], rows, limits, wanted, further)
        return spread(drafts, places, len(wanted.rows))

    def _forward(
        self, batch: AttentionBatch, token_ids: Tensor, hidden: Tensor, output_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs = ModelInputs(
            batch,
            {spec: plan_of(self._attention, batch, spec) for spec in self._specs},
            token_ids=token_ids,
            before_layer=self._before_layer,
            ops=self._ops,
            output_rows=output_rows,
        )
        return self._model.draft(inputs, hidden)
