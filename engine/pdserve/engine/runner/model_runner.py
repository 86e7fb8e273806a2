"""`ModelRunner`: makes tensors of a `SchedulerOutput`, runs the decoder and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.finite_values import are_finite, finite_rows, is_finite_vector, not_finite
from pdserve.engine.runner.input_batch import InputBatch
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.sampling.sampler import Sampler, SamplerOutput
from pdserve.engine.scheduler_output import GrammarOutput, ModelRunnerOutput, RequestFailure, SchedulerOutput
from pdserve.kernels.attention_backend import AttentionBackend
from pdserve.kernels.attention_batch import AttentionBatch
from pdserve.kernels.attention_spec import AttentionSpec
from pdserve.kernels.layer_ops import LayerOps
from pdserve.models.model_inputs import ModelInputs


class DecoderModel(Protocol):
    """The interface of a model for the runner."""

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""

    @property
    def attention_specs(self) -> Sequence[Sequence[AttentionSpec]]:
        """Different specs of the layers, per KV cache group; `ModelInputs.plans` has a plan for each."""

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Last hidden states `[T, H]`; writes K and V of all T tokens into the cache."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` float32."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step between `execute_model` and `sample_tokens`."""

    hidden: Tensor
    """`[T, H]`"""
    rows: IntArray
    """`[S]`, rows of the batch."""
    counts: IntArray
    """`[S]`, tokens of each row."""


class ModelRunner:
    """One model with the KV pools of its cache groups, on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        attention: Sequence[AttentionBackend],
        ops: LayerOps,
        kv_caches: Sequence[Tensor],
        vocab_size: int,
        before_layer: Callable[[], None] | None = None,
        logits_processors: LogitsProcessors | None = None,
    ) -> None:
        """kv_caches: by KV cache group, at least one. attention: made over each of them."""
        self._model = model
        self._attention = attention
        self._ops = ops
        self._kv_caches = kv_caches
        self._device = kv_caches[0].device
        self._dtype = kv_caches[0].dtype
        self._before_layer = before_layer
        self._sampler = Sampler(ops.sample)
        self._step: _Step | None = None
        self.kv_written: torch.cuda.Event | None = None
        """On a GPU, recorded after the last kernel that writes KV; None on a processor."""
        self.batch = InputBatch(config, vocab_size, logits_processors or LogitsProcessors(), len(kv_caches))

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Run the decoder over one step's tokens. `sample_tokens` must follow."""
        if self._step is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        for kv_cache, copies in zip(self._kv_caches, scheduled.block_copies, strict=False):
            if copies:
                self._ops.move_blocks(kv_cache, kv_cache, copies)
        self._update_batch(scheduled)
        rows, counts = self._decodes_first(scheduled)
        hidden = self._model.forward(self._inputs(rows, counts))
        self.batch.num_computed[rows] += counts
        self.kv_written = self._device_event()
        self._step = _Step(hidden, rows, counts)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Result of the step that `execute_model` ran. grammar: None if no sequence of the step needs a mask."""
        if self._step is None:
            raise RuntimeError("sample_tokens was called without execute_model")
        step, self._step = self._step, None
        hidden, rows, counts = step.hidden, step.rows, step.counts
        result = ModelRunnerOutput()
        failed: dict[str, PdServeError] = {}
        result.prompt_logprobs = self._prompt_logprobs(hidden, rows, counts, failed)
        ends = np.cumsum(counts) - 1
        complete = np.flatnonzero(self.batch.num_computed[rows] == self.batch.num_tokens[rows])
        if len(self.batch.pooler):
            self.batch.pooler.add_chunks(hidden, rows, counts)
            is_pooled = self.batch.pooler.is_pooled(rows[complete])
            result.pooler_output = self._pool(hidden, rows, ends, complete[is_pooled], failed)
            complete = complete[~is_pooled]
        if grammar is not None and grammar.late_req_ids:
            result.held_back = grammar.late_req_ids
            complete = self._without_late(grammar, rows, complete)
        if len(complete):
            logits = self._model.compute_logits(hidden[torch.from_numpy(ends[complete]).to(self._device)])
            self._sample_rows(logits, rows[complete], grammar, result, failed)
        result.failed_requests = {req_id: RequestFailure.of(error) for req_id, error in failed.items()}
        return result

    def _without_late(self, grammar: GrammarOutput, rows: IntArray, complete: IntArray) -> IntArray:
        """The complete rows whose grammar mask has arrived. A later step computes the last token of the other rows again."""
        late = np.array([self.batch.rows[req_id] for req_id in grammar.late_req_ids], np.int64)
        self.batch.num_computed[late] -= 1
        return complete[~np.isin(rows[complete], late)]

    def _sample_rows(
        self,
        logits: Tensor,
        rows: IntArray,
        grammar: GrammarOutput | None,
        result: ModelRunnerOutput,
        failed: dict[str, PdServeError],
    ) -> None:
        """Sample the batch's rows `rows` `[N]` from logits `[N, V]` into `result`. failed: receives requests with NaN or
        infinity."""
        num_sequences = self.batch.num_sequences[rows]
        is_finite = finite_rows(logits)  # the sampler changes the logits
        output = self._sample(logits, rows, num_sequences, grammar)
        req_ids = self.batch.req_ids
        for row in rows[~is_finite.cpu().numpy()].tolist():
            failed[req_ids[row]] = not_finite("logits", self._dtype)
        result.req_ids = [req_ids[row] for row in np.repeat(rows, num_sequences).tolist()]
        result.sampled_token_ids = [[token_id] for token_id in output.sampled_token_ids.tolist()]
        result.logprobs = output.logprobs.lists() if output.logprobs is not None else {}
        result.failed = {place: RequestFailure.of(error) for place, error in output.failed.items()}

    def _sample(
        self, logits: Tensor, rows: IntArray, num_sequences: IntArray, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        """One token for each sequence. logits `[N, V]`, rows and num_sequences `[N]`."""
        if (num_sequences == 1).all():
            output = self._sampler(logits, self.batch.sampling_metadata(rows, grammar))
            self.batch.append_tokens(rows, output.sampled_token_ids)
            return output
        firsts = np.cumsum(num_sequences) - num_sequences
        places = np.repeat(np.arange(len(rows)), num_sequences)
        offsets = np.arange(len(places)) - firsts[places]
        logits = logits[torch.from_numpy(places).to(self._device)]
        output = self._sampler(logits, self.batch.sampling_metadata(rows[places], grammar, offsets))
        self.batch.append_tokens(rows, output.sampled_token_ids[firsts])
        return output

    def _prompt_logprobs(
        self, hidden: Tensor, rows: IntArray, counts: IntArray, failed_requests: dict[str, PdServeError]
    ) -> dict[str, LogprobsLists]:
        """request_id -> log-probabilities of this step's chunk, if requested. failed_requests: receives requests with NaN."""
        batch = self.batch
        if not len(batch.prompt_logprobs):
            return {}
        found = batch.prompt_logprobs.of_step(
            hidden, rows, counts, batch.num_computed, batch.token_ids, batch.num_prompt, self._model.compute_logits
        )
        by_request = {batch.req_ids[row]: lists for row, lists in found.items()}
        for request_id in [request_id for request_id, lists in by_request.items() if not are_finite(lists)]:
            failed_requests[request_id] = not_finite("prompt log-probabilities", self._dtype)
            del by_request[request_id]
        return by_request

    def _pool(
        self,
        hidden: Tensor,
        rows: IntArray,
        ends: IntArray,
        complete: IntArray,
        failed_requests: dict[str, PdServeError],
    ) -> dict[str, list[float]]:
        """request_id -> embedding of the step's rows at `complete`. failed_requests: receives requests with NaN or infinity."""
        if len(complete) == 0:
            return {}
        pooled_rows = rows[complete]
        last = hidden[torch.from_numpy(ends[complete]).to(self._device)]
        vectors = self.batch.pooler.finish(last, pooled_rows, self.batch.num_tokens[pooled_rows])
        req_ids = (self.batch.req_ids[row] for row in pooled_rows.tolist())
        pooled = dict(zip(req_ids, vectors, strict=True))
        for request_id in [request_id for request_id, vector in pooled.items() if not is_finite_vector(vector)]:
            failed_requests[request_id] = not_finite("embeddings", self._dtype)
            del pooled[request_id]
        return pooled

    def _device_event(self) -> torch.cuda.Event | None:
        """An event after all work queued on the device so far; None on a processor, which computes at once."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _update_batch(self, scheduled: SchedulerOutput) -> None:
        for req_id in scheduled.finished_req_ids:
            self.batch.remove(req_id)
        for request in scheduled.scheduled_new_reqs:
            self.batch.add(request)
        for req_id, block_ids in scheduled.scheduled_cached_reqs.new_block_ids.items():
            self.batch.add_blocks(req_id, block_ids)

    def _decodes_first(self, scheduled: SchedulerOutput) -> tuple[IntArray, IntArray]:
        """Rows and their token counts, `[S]` each; rows with one token first, as `AttentionBatch` requires."""
        rows = np.fromiter((self.batch.rows[request_id] for request_id in scheduled.num_scheduled_tokens), np.int64)
        counts = np.fromiter(scheduled.num_scheduled_tokens.values(), np.int64)
        order = np.argsort(counts > 1, kind="stable")
        return rows[order], counts[order]

    def _inputs(self, rows: IntArray, counts: IntArray) -> ModelInputs:
        """Token ids `[T]`, and an attention plan for each spec of the model."""
        batch = self.batch
        computed = batch.num_computed[rows]
        row_of_token = np.repeat(rows, counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(starts - computed, counts)
        seq_lens = computed + counts
        batches = [
            AttentionBatch.from_arrays(
                positions=positions,
                slot_mapping=table.slot_mapping(row_of_token, positions),
                query_lens=counts,
                seq_lens=seq_lens,
                block_tables=table.of_step(rows, seq_lens),
                device=self._device,
            )
            for table in batch.block_tables
        ]
        groups = zip(self._attention, batches, self._model.attention_specs, strict=True)
        return ModelInputs(
            batch=batches[0],
            plans={spec: attention.plan(of_group, spec) for attention, of_group, specs in groups for spec in specs},
            token_ids=self._tensor(batch.token_ids[row_of_token, positions]),
            before_layer=self._before_layer,
            ops=self._ops,
        )

    def _tensor(self, array: IntArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
