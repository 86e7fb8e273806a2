"""`EngineCore`: scheduler and model runner under one `step`. Used by one thread; has no queues and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from pdserve.common import clock
from pdserve.common.block_hash import BlockHasher
from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import InvalidRequest, PdServeError, TransferFailed
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats, StreamingUpdate
from pdserve.common.request.pooling_params import PoolingParams, verify_generates
from pdserve.common.request.sampling_params import SamplingParams, verify_token_ids
from pdserve.engine.config import EngineConfig
from pdserve.engine.executor.executor import Executor, StepResult
from pdserve.engine.heartbeat import Heartbeat
from pdserve.engine.lora.lora_runner import Adapters
from pdserve.engine.request import Request
from pdserve.engine.request_verifier import RequestVerifier
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.scheduler.async_scheduling import living
from pdserve.engine.scheduler.kv_messages import IntoEngine, KvOutbox, NoTransfers, ReceiveFailed, SourceFinished
from pdserve.engine.scheduler.scheduler import Scheduler
from pdserve.engine.scheduler.scheduler_stats import make_stats
from pdserve.engine.scheduler_output import GrammarOutput, SchedulerOutput
from pdserve.engine.stats.step_profile import StepProfile
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.structured_output_manager import MASK_WAIT_S

LOAD_WAIT_S = 0.005
"""Seconds that a step without tokens waits for a load from a tier, or a lookup there."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step between its launch and `finish_step`."""

    scheduled: SchedulerOutput
    requests: Mapping[str, Request]
    """The step's sequences when it was launched."""
    kv_written: DeviceEvent | None
    """On a GPU, the event after which the step's KV is in the pool."""
    scheduling_s: float
    result: StepResult | None = None
    """None if the step computes nothing, and before sampling is queued."""


class EngineCore:
    """Scheduler and executor of one model. Usage: `add_request`, then `step` until every request has finished."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        heartbeat: Heartbeat,
        hasher: BlockHasher,
        vocab_size: int,
        connector: KvOutbox | None = None,
        grammars: GrammarCompiler | None = None,
        logits_processors: LogitsProcessors | None = None,
        adapters: Adapters | None = None,
        stored_names: Iterable[bytes] = (),
    ) -> None:
        """heartbeat: advanced at each step, and by the executor before each call that computes layers.

        grammars: None without a tokenizer; requests for structured outputs are refused then. logits_processors: plug-ins that
        requests may name; default: none. adapters: None without LoRA. stored_names: of the blocks that the store has from before.
        """
        self.config = config
        self.vocab_size = vocab_size
        self.executor = executor
        self.heartbeat = heartbeat
        self.has_computed = False
        """True if the last step computed something; running sequences may all wait for blocks."""
        self.scheduler = Scheduler(config, hasher, connector or NoTransfers(), grammars)
        if (store := self.scheduler.pool.store) is not None:
            store.know(stored_names)
        self.scheduler.pool.announce_stored()
        self.adapters = adapters
        self.profile = StepProfile(config.profile_interval_s, config.profile_steps)
        self.verifier = RequestVerifier(
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_sequences=config.max_sequences,
            vocab_size=vocab_size,
            hidden_size=executor.hidden_size,
            num_labels=config.num_labels,
            enable_prompt_embeds=config.enable_prompt_embeds,
            has_grammars=self.scheduler.grammars.is_possible,
            logits_processors=logits_processors or LogitsProcessors(),
            encoder=config.encoder,
            encoder_decoder=config.encoder_decoder,
            knows_adapter=None if adapters is None else adapters.has,
            has_transfers=connector is not None,
        )
        self._ahead: StepInFlight | None = None
        """A step that was launched while the one before was awaited."""

    def verify(self, request: EngineCoreRequest) -> None:
        """As `RequestVerifier.verify`."""
        self.verifier.verify(request)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request that `verify` accepted.

        Token ids are checked again, that the model generates, and that there are transfers where the request needs them: each would
        fail the whole step and end the engine, so a caller that did not call `verify` loses only this request.
        """
        refusal = _refusal(lambda: self._verify_entry(request))
        if not self.verifier.has_transfers:
            # no message about the request may reach a connector that does not exist
            request = msgspec.structs.replace(request, remote_prefill=False, transfer_source=False)
        if any(token_id >= self.vocab_size for token_id in request.eos_token_ids):
            # the model cannot sample other ids, and a grammar with such an EOS id does not compile
            known = tuple(token_id for token_id in request.eos_token_ids if token_id < self.vocab_size)
            request = msgspec.structs.replace(request, eos_token_ids=known)
        self.scheduler.add_request(request, refusal)

    def _verify_entry(self, request: EngineCoreRequest) -> None:
        """Raises: InvalidRequest for what would fail a step."""
        self._verify_ids(request.prompt_token_ids, request.output_token_ids)
        if request.pooling_params is None:
            verify_generates(self.config.num_labels)
        if not self.verifier.has_transfers:
            request.verify_without_transfers()

    def _verify_ids(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()) -> None:
        """Raises: InvalidRequest for ids outside the vocabulary."""
        verify_token_ids("prompt_token_ids", prompt_token_ids, self.vocab_size)
        verify_token_ids("output_token_ids", output_token_ids, self.vocab_size)

    def verify_update(self, update: StreamingUpdate) -> None:
        """As `RequestVerifier.verify_update`."""
        self.verifier.verify_update(update)

    def resume_request(self, update: StreamingUpdate) -> None:
        """Begin the next turn of a session, after `verify_update`. Ids are checked as in `add_request`."""
        refusal = _refusal(lambda: self._verify_ids(update.prompt_token_ids))
        self.scheduler.session_commands.resume_request(update, refusal)

    def fail_request(self, request_id: str, cause: PdServeError) -> None:
        """End a request with an error. No effect if it has ended."""
        self.scheduler.fail_request(request_id, cause)

    def abort_request(self, request_id: str) -> Request | None:
        """End a request; returns it, or None if it had ended."""
        return self.scheduler.abort_request(request_id)

    def finish_session(self, request_id: str) -> None:
        """End a session, after the turns that have arrived. No effect if it has ended."""
        self.scheduler.session_commands.finish_session(request_id)

    def apply(self, event: IntoEngine) -> None:
        """Apply an event from the transfer side. Its token ids are checked, since an id outside the vocabulary would end the
        engine."""
        if isinstance(event, SourceFinished) and any(not 0 <= token < self.vocab_size for token in event.token_ids):
            cause = TransferFailed(
                f"a first token from the source is outside the vocabulary of {self.vocab_size} tokens"
            )
            event = ReceiveFailed(event.request_id, cause)
        self.scheduler.apply(event)

    def fail_all(self, cause: PdServeError) -> None:
        """End every request with an error."""
        self.scheduler.fail_all(cause)

    def fail_idle_sessions(self, cause: PdServeError) -> None:
        """End sessions that are between two turns with an error."""
        self.scheduler.session_commands.fail_idle(cause)

    @property
    def has_work(self) -> bool:
        return self._ahead is not None or self.scheduler.has_work

    def wait_for_grammar(self, timeout_s: float) -> None:
        """Block while only the arrival of a grammar could give a step work; for callers without an engine thread."""
        if self._ahead is None and not self.scheduler.has_tokens_to_compute and len(self.scheduler.grammars):
            self.scheduler.grammars.wait(timeout_s)

    def step(self) -> EngineCoreOutputs:
        """Schedule, compute, update. Cheap if nothing can run.

        With `async_scheduling` the next step is launched before the result of this one is awaited, where the scheduler knows what
        it computes: it reads its tokens from the device. So the device computes while the host applies a result; and since the
        result of a step is awaited before the step after the next is launched, no more than one is ahead.
        """
        step, self._ahead = self._ahead, None
        self._take_copies(0.0)
        if step is None:
            step = self.begin_step()
        ahead = self._launch_ahead(step)
        outputs = self.finish_step(step)
        if ahead is not None:
            # its rules read the tokens that have just become known
            self._ahead = self._sample(ahead, None)
        return outputs

    def begin_step(self) -> StepInFlight:
        """First half of a step: schedule, and start the executor. Raises: WorkerLost when a rank has ended."""
        self.heartbeat.beat()
        self.executor.check_health()
        started = clock.monotonic()
        scheduled = self.scheduler.schedule()
        self._copy_blocks(scheduled)
        if not scheduled.num_scheduled_tokens:
            return StepInFlight(scheduled, {}, None, 0.0)
        step = self._launch(scheduled, clock.monotonic() - started)
        grammar = self.scheduler.get_grammar_bitmask(scheduled)
        return self._sample(step, grammar)

    def _sample(self, step: StepInFlight, grammar: GrammarOutput | None) -> StepInFlight:
        """Ask for the result of a launched step. A draft head writes the entries of the step's tokens after they are sampled."""
        result = self.executor.sample_tokens(grammar)
        return replace(step, result=result, kv_written=self._noted_write())

    def _noted_write(self) -> DeviceEvent | None:
        """On a GPU, the event after which all that is queued is in the pool; the scheduler notes it."""
        kv_written = self.executor.kv_written
        self.scheduler.step_launched(kv_written)
        return kv_written

    def _copy_blocks(self, scheduled: SchedulerOutput) -> None:
        """Queue the copies between the tiers; then transfers may write into the blocks reserved for them."""
        copied = self.executor.copy_blocks(scheduled) if scheduled.has_copies else None
        self.scheduler.receives.send_reserved(copied)

    def _take_copies(self, timeout_s: float) -> None:
        """Apply loads, lookups and writes that have ended. timeout_s: seconds to wait for the first while one is under way that
        sequences may wait for."""
        if self.scheduler.loads.has_copies:
            self.scheduler.copies_finished(self.executor.finished_copies(timeout_s if self.is_loading else 0.0))

    @property
    def is_loading(self) -> bool:
        """True if a load from a tier or a lookup there is under way; a step ends it."""
        return self.scheduler.loads.has_waiting

    def _launch(self, scheduled: SchedulerOutput, scheduling_s: float) -> StepInFlight:
        self.executor.execute_model(scheduled)
        kv_written = self.executor.kv_written
        self.scheduler.step_launched(kv_written)
        requests = self.scheduler.requests
        launched = {req_id: requests[req_id] for req_id in scheduled.num_scheduled_tokens}
        return StepInFlight(scheduled, launched, kv_written, scheduling_s)

    def _launch_ahead(self, step: StepInFlight) -> StepInFlight | None:
        """Launch the step after `step`, whose result is still to come; None if it must wait for it."""
        if not self.config.async_scheduling or step.result is None:
            return None
        started = clock.monotonic()
        scheduled = self.scheduler.async_scheduling.next_step(step.scheduled)
        if scheduled is None:
            return None
        self.heartbeat.beat()
        self._copy_blocks(scheduled)
        return self._launch(scheduled, clock.monotonic() - started)

    def finish_step(self, step: StepInFlight) -> EngineCoreOutputs:
        """Second half of a step: wait for the result and apply it. Raises: the exception of the executor's step."""
        self.has_computed = step.result is not None
        computed, update_began = None, 0.0
        if step.result is not None:
            computed = step.result.result()
            update_began = clock.monotonic()
            kv_written = step.kv_written
            if step.scheduled.tentative_req_ids:
                # states have been written since the launch
                kv_written = self._noted_write()
            scheduled, computed = living(self.scheduler.requests, step.requests, step.scheduled, computed)
            self.scheduler.drop_states(step.requests, scheduled)
            num_before = self.scheduler.num_computed_prompt_tokens
            self.scheduler.update_from_output(scheduled, computed, kv_written)
            if self.scheduler.num_computed_prompt_tokens > num_before:
                self.scheduler.prefill_s += computed.compute_s
            self.scheduler.grammars.hosts.flush()
        else:
            self.scheduler.requeue_finished_ids(step.scheduled)
            self.scheduler.grammars.hosts.wait(MASK_WAIT_S)
            self._take_copies(LOAD_WAIT_S)
        stored, removed = self.scheduler.pool.take_changes()
        outputs = self.scheduler.outputs.take()
        if computed is not None and computed.stats is not None:
            self.profile.add(step.scheduling_s, clock.monotonic() - update_began, computed.stats)
        ended = dict.fromkeys(output.request_id for output in outputs if output.finished)
        return EngineCoreOutputs(
            outputs=outputs,
            finished_req_ids=[request_id for request_id in ended if not self.scheduler.group.has(request_id)],
            scheduler_stats=self.stats(),
            blocks_stored=stored,
            blocks_removed=removed,
            model_runner_stats=None if computed is None else computed.stats,
        )

    def stats(self) -> SchedulerStats:
        """Current statistics."""
        return make_stats(self.scheduler, self.profile)

    def warm_up(self) -> None:
        """Run every path once, so that the first request has no initialization cost; leaves no state."""
        prompts = self.config.encoder_decoder
        room = self.config.max_model_len - 3 if prompts is None else min(prompts.max_len, prompts.max_output_tokens - 2)
        length = min(room, 2 * self.config.block_size + 1)
        if length < 1:
            return
        for greedy in (True, False):
            params = SamplingParams(
                temperature=0.0 if greedy else 1.0, seed=0, max_tokens=3, ignore_eos=True, top_p=0.9
            )
            request = EngineCoreRequest(
                request_id=f"warm-up-{greedy}",
                prompt_token_ids=[0] * length,
                sampling_params=params,
                pooling_params=PoolingParams(task="classify") if self.config.num_labels else None,
                prefill_here=True,
            )
            if prompts is not None:
                laid_out = prompts.laid_out(request.prompt_token_ids, self.config.block_size, prompts.silence())
                request = msgspec.structs.replace(request, **laid_out)
            self.add_request(request)
        while self.has_work:
            self.step()
        self.executor.warm_up()
        self.scheduler.forget_history()
        self.profile.forget()
        self.scheduler.pool.announce_stored()


def _refusal(check: Callable[[], None]) -> InvalidRequest | None:
    """The error that `check` raises; None if it passes."""
    try:
        check()
    except InvalidRequest as error:
        return error
    return None
