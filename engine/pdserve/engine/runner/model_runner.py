"""`ModelRunner`: makes tensors of a `SchedulerOutput`, runs the decoder and samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.lora.lora_runner import LoraRunner
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.device.device_runtime import DeviceRuntime, make_runtime
from pdserve.engine.runner.device.staging_buffer import PendingArrays, ReadbackBuffer, StagingBuffer
from pdserve.engine.runner.device.step_graphs import StepGraphs, can_capture
from pdserve.engine.runner.device.step_times import LayerTimes, StepTimes
from pdserve.engine.runner.drafts.drafted_runs import read_runs, without_late_masks
from pdserve.engine.runner.drafts.drafting import Drafting
from pdserve.engine.runner.drafts.head_drafter import FilledStep, HeadDrafter
from pdserve.engine.runner.encoders.encoder_runner import EncoderRunner
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.engine.runner.inputs.sampled_inputs import SampledInputs, SampledPlan
from pdserve.engine.runner.inputs.step_inputs import StepInputBuilder, attention_plans
from pdserve.engine.runner.results.finite_values import are_finite, finite_rows, is_finite_vector, not_finite
from pdserve.engine.runner.results.tentative_states import TentativeStates
from pdserve.engine.sampling.grammar_mask import GrammarMask
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.sampling.sampler import Sampled, Sampler, SamplerOutput, SamplingMetadata, TokenSampler
from pdserve.engine.sampling.token_texts import TokenTexts
from pdserve.engine.scheduler_output import GrammarOutput, ModelRunnerOutput, RequestFailure, SchedulerOutput
from pdserve.engine.speculation.drafter import Drafter
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerBackend
from pdserve.kernels.rank_group import RankGroup
from pdserve.models.kv_cache import pools_of
from pdserve.models.model_inputs import ModelInputs


@dataclass(frozen=True, slots=True)
class _Step:
    """A step between `execute_model` and `sample_tokens`."""

    hidden: Tensor
    """`[N, H]` of `output_rows`."""
    output_rows: Tensor | None
    rows: IntArray
    """`[S]`, rows of the batch."""
    counts: IntArray
    """`[S]`, tokens of each row."""
    pooled: IntArray
    """Places of the complete rows that are pooled."""
    sampled: SampledInputs | None
    times: StepTimes
    failed_loras: dict[str, RequestFailure]
    """See `ModelRunnerOutput.failed_loras`."""
    filled: FilledStep | None
    """None without a draft head."""
    states: TentativeStates | None
    """None: every token of the step stands, or the model has no states."""


class PendingOutput:
    """Result of a step whose work is queued; of one `ModelRunner`, in the order of its steps."""

    def __init__(
        self, runner: ModelRunner, output: ModelRunnerOutput, sampled: tuple[SampledPlan, Sampled] | None,
        arrays: PendingArrays | None, times: StepTimes, states: TentativeStates | None = None,
    ) -> None:  # fmt: skip
        """sampled and arrays: None if no row is sampled. states: see `_Step`."""
        self._runner = runner
        self._output = output
        self._sampled = sampled
        self._arrays = arrays
        self._times = times
        self._states = states

    def result(
        self,
        num_tokens: Mapping[str, int] | None = None,
        *,
        drafts: bool = True,
        on_read: Callable[[ModelRunnerOutput], None] | None = None,
    ) -> ModelRunnerOutput:
        """Wait for the step, at most once.

        num_tokens: as of `ModelRunner.read`. drafts: False on a rank above 0, unless rank 0 drafts. on_read: called before
        states are written, and anything is drafted.
        """
        self._times.ended.synchronize()
        if self._sampled is not None and self._arrays is not None:
            plan, sampled = self._sampled
            is_finite, *arrays = self._arrays.wait()
            self._runner.read(plan, is_finite, sampled.on_host(arrays), self._output, num_tokens)
        if on_read is not None:
            on_read(self._output)
        if self._sampled is not None:
            if self._states is not None:
                self._runner.write_states(self._states)
            if drafts:
                self._runner.draft(self._output)
        self._output.compute_s = self._times.ended.seconds_since(self._times.started)
        self._output.stats = self._times.stats()
        return self._output


class ModelRunner:
    """One model with the KV pools of its cache groups, on one device."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        attention: Sequence[LayerBackend],
        ops: LayerOps,
        kv_caches: Sequence[Tensor],
        vocab_size: int,
        before_layer: Callable[[], None] | None = None,
        logits_processors: LogitsProcessors | None = None,
        runtime: DeviceRuntime | None = None,
        lora: LoraRunner | None = None,
        sampler: TokenSampler | None = None,
        drafter: Drafter | None = None,
        draft_head: HeadDrafter | None = None,
        group: RankGroup | None = None,
        token_texts: TokenTexts | None = None,
    ) -> None:
        """kv_caches: by KV cache group, at least one. attention: made over each of them. runtime: default: the device's.

        lora: None without adapters. sampler: default: `Sampler`. drafter: that of `config.speculative_config`, if it is set.
        draft_head: of a model with one, whose cache the steps fill.
        group: the ranks that share the model; None for one. token_texts: None without a tokenizer.
        """
        self._config = config
        self._model = model
        self._attention = attention
        self._ops = ops
        self._group = group
        self._pools = pools_of(kv_caches)
        self._vocab_size = vocab_size
        self._device = kv_caches[0].device
        self._dtype = model.dtype
        self._before_layer = before_layer
        self.lora = lora
        self._runtime = runtime or make_runtime(self._device)
        self._layer_times = LayerTimes(self._runtime, before_layer) if config.collect_layer_times else None
        self._sampler = sampler or Sampler(ops.sample)
        self._step: _Step | None = None
        self._graphs: StepGraphs | None = None
        self.kv_written: DeviceEvent | None = None
        """On a GPU, reached after the last kernel that writes KV; None on a CPU."""
        processors = logits_processors or LogitsProcessors()
        self.batch = InputBatch(config, vocab_size, processors, len(kv_caches), token_texts)
        self._runs_ahead = config.async_scheduling
        self.drafting: Drafting | None = None
        if config.speculative_config is not None and drafter is not None:
            self.drafting = Drafting(drafter, config.speculative_config.disable_by_batch_size)
        self._draft_head = draft_head
        self._rules_staging = StagingBuffer(self._device, self._runtime)
        self._readback = ReadbackBuffer(self._device, self._runtime)
        self.encoder = EncoderRunner.of_batch(config, model, self.batch, kv_caches[0])
        self._inputs = StepInputBuilder(
            config,
            self.batch,
            self._device,
            StagingBuffer(self._device, self._runtime),
            vocab_size,
            attention,
            model.attention_specs,
            packs_parameters=ops.sample is not None or self._device.type != "cpu",
        )

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture decode steps of all sizes and short prompts, where device and attention back ends can, unless `enforce_eager`
        forbids it.

        Afterwards steps of decode rows only, and of short prompts only, replay them. No step may be under way.
        """
        is_capturable = getattr(self._model, "is_capturable", True)
        if self._config.enforce_eager or not is_capturable or not can_capture(self._attention, self._runtime):
            return
        model, ops = self._model, self._ops
        graphs = StepGraphs(self._config, model, self._attention, ops, self._device, self._dtype, self._runtime)
        graphs.capture(self._before_layer, self.lora)
        self._graphs = graphs

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Queue the decoder over one step's tokens. `sample_tokens` must follow.

        The tokens that the step before sampled may still be pending: a row's input is then its newest token on the device.
        """
        if self._step is not None:
            raise RuntimeError("execute_model was called twice without sample_tokens")
        started = self._runtime.event()
        for kv_cache, copies in zip(self._pools, scheduled.block_copies, strict=False):
            if copies:
                self._ops.move_blocks(kv_cache, kv_cache, copies)
        self._update_batch(scheduled)
        self.encoder.update(scheduled)
        batch = self.batch
        rows, counts, tentative = batch.decodes_first(scheduled.num_scheduled_tokens, scheduled.tentative_req_ids)
        num_before = batch.num_computed[rows[tentative]]
        images = self.encoder.of_step(batch.mm_features, rows, counts, batch.num_computed[rows])
        failed_loras, has_adapters = dict[str, RequestFailure](), False
        if self.lora is not None:
            failed_loras = self.lora.load(scheduled.lora_loads)
            has_adapters = self.lora.set_rows(batch.lora_slots[rows], counts)
        batch.num_computed[rows] += counts
        complete = np.flatnonzero(batch.are_complete(rows))
        batch.num_computed[rows] -= counts
        pooled = complete[:0]
        if len(batch.pooler):
            is_pooled = batch.pooler.is_pooled(rows[complete])
            pooled, complete = complete[is_pooled], complete[~is_pooled]
        reads_embeds = len(batch.prompt_embeds) > 0 and batch.prompt_embeds.are_read(rows, batch.num_computed)
        graphs, shape = self._graphs, None
        # a graph writes the states of all rows
        is_eager = reads_embeds or images is not None or bool(tentative) or (len(batch.mrope) > 0 and counts[-1] > 1)
        if graphs is not None and not is_eager:
            shape = graphs.shape_for(counts, has_adapters)
        inputs = self._inputs.build(rows, counts, complete, shape, tentative)
        times = StepTimes(started, len(rows), int(counts.sum()))
        times.prepared = self._runtime.event()
        embedded = output_rows = states = None
        layer_inputs: list[Tensor] | None = None
        if graphs is not None and shape is not None:
            if self._before_layer is not None:
                self._before_layer()
            hidden = graphs.run(inputs, shape, has_adapters)
        else:
            if reads_embeds or images is not None:
                embedded = self._model.embed_input_ids(inputs.token_ids)
                batch.prompt_embeds.put(embedded, rows, counts, batch.num_computed)
            if self._draft_head is not None and self._draft_head.needs_layer_inputs:
                layer_inputs = []
            reads_all = has_adapters or self._draft_head is not None
            if not (reads_all or len(batch.prompt_logprobs) or len(batch.pooler)):
                output_rows = inputs.output_rows()
            given = ModelInputs(
                batch=inputs.batches[0],
                plans=attention_plans(self._attention, inputs.batches, self._model.attention_specs),
                token_ids=inputs.token_ids if embedded is None else None,
                inputs_embeds=embedded,
                before_layer=self._layer_times or self._before_layer,
                is_by_layer=self._layer_times is not None,
                ops=self._ops,
                output_rows=output_rows,
                layer_inputs=layer_inputs,
            )
            if tentative:
                states = TentativeStates.of(given.plans.values(), rows[tentative], num_before)
            hidden = self._model.forward(self.encoder.placed(given, images))
            if self._group is not None and not len(hidden):
                # blocks of all ranks are published when rank 0's step ends; without hidden states no operation of the ranks
                # comes after the last layer's keys and values
                self._group.all_reduce(hidden.new_zeros(1))
        batch.num_computed[rows] += counts
        times.forwarded = times.sampling = self._runtime.event()
        if self._layer_times is not None:
            times.add_layers(self._layer_times.take())
        self.kv_written = None if self._runtime.is_synchronous else times.forwarded
        filled = None
        if self._draft_head is not None:
            taken = self._draft_head.taken(hidden, layer_inputs or ())
            filled = FilledStep(inputs.batches[-1], taken, inputs.row_of_token, inputs.positions)
        self._step = _Step(
            hidden, output_rows, rows, counts, pooled, inputs.sampled, times, failed_loras, filled, states
        )

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        """Queue sampling for the step that `execute_model` began. No token of an earlier step may be pending.

        grammar: None if no sequence of the step needs a mask.
        """
        if self._step is None:
            raise RuntimeError("sample_tokens was called without execute_model")
        step, self._step = self._step, None
        hidden, rows, counts = step.hidden, step.rows, step.counts
        if self._runtime.is_synchronous:
            step.times.sampling = self._runtime.event()
        result = ModelRunnerOutput(failed_loras=step.failed_loras)
        failed: dict[str, PdServeError] = {}
        result.prompt_logprobs = self._prompt_logprobs(hidden, rows, counts, failed)
        if len(self.batch.pooler):
            self.batch.pooler.add_chunks(hidden, rows, counts)
            result.pooler_output = self._pool(hidden, rows, np.cumsum(counts) - 1, step.pooled, failed)
        result.failed_requests = {req_id: RequestFailure.of(error) for req_id, error in failed.items()}
        if grammar is not None and grammar.late_req_ids:
            result.held_back = grammar.late_req_ids
            # a later step computes the last token of these rows again
            self.batch.num_computed[[self.batch.rows[req_id] for req_id in grammar.late_req_ids]] -= 1
        if step.sampled is None:
            self._fill_drafts(step, None)
            step.times.ended = self._runtime.event()
            return PendingOutput(self, result, None, None, step.times)
        return self._sample(step, step.sampled, grammar, result)

    def _sample(
        self, step: _Step, inputs: SampledInputs, grammar: GrammarOutput | None, result: ModelRunnerOutput
    ) -> PendingOutput:
        plan = inputs.plan
        logits = self._model.compute_logits(step.hidden[inputs.ends] if step.output_rows is None else step.hidden)
        is_finite = finite_rows(logits)  # the sampler changes the logits
        if inputs.places is not None:
            logits = logits[inputs.places]
        metadata, placed = self._with_late_rules(inputs, grammar)
        sampled = self._sampler.launch(logits, metadata, placed, inputs.packed_rows)
        self._fill_drafts(step, (inputs, sampled))
        if grammar is not None:
            plan = without_late_masks(plan, grammar)
        if self._runs_ahead and plan.places is None and plan.runs is None:
            self._inputs.keep_newest(inputs.rows, sampled.token_ids)
            self.batch.expect_tokens(plan.rows)
        arrays = self._readback.start([is_finite, *sampled.tensors()])
        step.times.ended = self._runtime.event()
        return PendingOutput(self, result, (plan, sampled), arrays, step.times, step.states)

    def _fill_drafts(self, step: _Step, sampled: tuple[SampledInputs, Sampled] | None) -> None:
        """Write the entries of the draft head's cache that belong to the step's tokens."""
        if self._draft_head is None or step.filled is None:
            return
        self._draft_head.fill(step.filled, self.batch, sampled)
        if self._group is not None:
            # as in `execute_model`: the blocks of all ranks are published when rank 0's step ends
            self._group.all_reduce(step.hidden.new_zeros(1))
        if not self._runtime.is_synchronous:
            self.kv_written = self._runtime.event()

    def _with_late_rules(
        self, inputs: SampledInputs, grammar: GrammarOutput | None
    ) -> tuple[SamplingMetadata, PlacedArrays]:
        """The metadata with what was not known when the step's inputs were staged, and its arrays on the device."""
        plan, metadata, arrays = inputs.plan, inputs.plan.metadata, list[NDArray[Any]]()
        if plan.is_pending:
            metadata = self.batch.with_rules(metadata, plan.row_of_token)
            arrays = metadata.arrays()
        mask = None
        if grammar is not None:
            mask = GrammarMask.of_step(grammar, self.batch.rows, plan.row_of_token, plan.offset_of_token)
        if mask is not None:
            metadata = replace(metadata, grammar_mask=mask)
            arrays = [*arrays, *mask.arrays()]
        if arrays:
            inputs.placed.add(arrays, self._rules_staging.upload(arrays))
        return metadata, inputs.placed

    def read(
        self,
        plan: SampledPlan,
        is_finite: NDArray[np.bool_],
        sampled: SamplerOutput,
        result: ModelRunnerOutput,
        num_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Append the tokens of a step to the batch, and write them into `result`, without those of rows that are held back.

        Rows that left the batch meanwhile are only in the result. num_tokens: on ranks above 0, `ReadRuns.num_tokens`.
        """
        if plan.runs is not None:
            read_runs(self.batch, plan, is_finite, sampled, result, self._dtype, num_tokens)
            return
        firsts, req_ids = plan.firsts, plan.req_ids
        is_held = np.isin(np.array(req_ids), result.held_back) if result.held_back else np.zeros(len(req_ids), np.bool_)
        is_there = np.array(
            [self.batch.rows.get(req_id) == row for req_id, row in zip(req_ids, plan.rows.tolist(), strict=True)]
        )
        kept = is_there & ~is_held
        self.batch.append_tokens(plan.rows[kept], sampled.sampled_token_ids[firsts[kept]])
        self.batch.expect_none()
        broken = {
            req_ids[place]: RequestFailure.of(not_finite("logits", self._dtype))
            for place in np.flatnonzero(~is_finite & ~is_held).tolist()
        }
        result.failed_requests |= broken
        logprobs = {} if sampled.logprobs is None else sampled.logprobs.lists()
        token_ids: list[int] = sampled.sampled_token_ids.tolist()
        places = range(len(req_ids)) if plan.places is None else plan.places.tolist()
        for number, place in enumerate(places):
            if is_held[place]:
                continue
            if number in logprobs:
                result.logprobs[len(result.req_ids)] = logprobs[number]
            if number in sampled.failed:
                result.failed[len(result.req_ids)] = RequestFailure.of(sampled.failed[number])
            result.req_ids.append(req_ids[place])
            result.sampled_token_ids.append([token_ids[number]])

    def write_states(self, states: TentativeStates) -> None:
        """Write the states of the tokens that stand, after `read`."""
        states.advance(self.batch.num_computed)
        if self.kv_written is not None:
            self.kv_written = self._runtime.event()

    def draft(self, result: ModelRunnerOutput) -> None:
        """Write the drafts of the next step into the result of the last one, unless the next one has begun."""
        if self.drafting is not None and self._step is None:
            self.drafting.propose(self.batch, result)

    @property
    def ranks_draft(self) -> bool:
        """True if `draft` would compute with all ranks."""
        return self.drafting is not None and self._draft_head is not None and self._step is None

    def _prompt_logprobs(
        self, hidden: Tensor, rows: IntArray, counts: IntArray, failed_requests: dict[str, PdServeError]
    ) -> dict[str, LogprobsLists]:
        """request_id -> log-probabilities of this step's chunk, if requested. failed_requests: receives requests with NaN."""
        batch = self.batch
        if not len(batch.prompt_logprobs):
            return {}
        found = batch.prompt_logprobs.of_step(
            hidden, rows, counts, batch.num_computed, batch.token_ids, batch.num_prompt, self._model.compute_logits,
            self._vocab_size, self._before_layer,
        )  # fmt: skip
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
        """request_id -> vector of the step's rows at `complete`. failed_requests: receives requests with NaN or infinity."""
        if len(complete) == 0:
            return {}
        pooled_rows = rows[complete]
        last = hidden[torch.from_numpy(ends[complete]).to(self._device)]
        num_tokens, classifier = self.batch.num_tokens[pooled_rows], self._model.classifier
        vectors = self.batch.pooler.finish(last, pooled_rows, num_tokens, classifier)
        req_ids = (self.batch.req_ids[row] for row in pooled_rows.tolist())
        pooled = dict(zip(req_ids, vectors, strict=True))
        for request_id in [request_id for request_id, vector in pooled.items() if not is_finite_vector(vector)]:
            failed_requests[request_id] = not_finite("classes" if classifier else "embeddings", self._dtype)
            del pooled[request_id]
        return pooled

    def _update_batch(self, scheduled: SchedulerOutput) -> None:
        for req_id in scheduled.finished_req_ids:
            self.batch.remove(req_id)
        for request in scheduled.scheduled_new_reqs:
            self.batch.add(request)
            if request.prompt_embeds is not None:
                row = self.batch.rows[request.req_id]
                self.batch.prompt_embeds.add(row, request.prompt_embeds, self._dtype, self._device)
        for req_id, block_ids in scheduled.scheduled_cached_reqs.new_block_ids.items():
            self.batch.add_blocks(req_id, block_ids)
        for req_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.batch.put_drafts(req_id, drafts)
