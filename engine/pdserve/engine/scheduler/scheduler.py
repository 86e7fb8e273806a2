"""`Scheduler`: chooses the work of each step.

The life of a sequence here:

1. `add_request` makes a `Request`. Its status names what it waits for, WAITING_FOR_FSM (its grammar) before WAITING_FOR_REMOTE_KVS
   (blocks from another worker, or what a shared store has of them), though it waits for both at once; without either it is WAITING.
2. For remote KV, `RemoteKvQueue` reserves blocks. When all have landed and the source's first tokens are known, the sequence is
   ready. A sequence with enough of its prompt in the cache on arrival is computed here instead.
3. `schedule` gives a step's token budget to running sequences (decoding before prefilling), then to waiting ones in the order of
   `WaitingQueues`, then to sources that run ahead. A prompt longer than the budget is computed in chunks.
4. An admitted sequence shares cached blocks, allocates the others and moves to RUNNING. If the host-memory tier has some of its
   blocks, it is WAITING_FOR_REMOTE_KVS until they are loaded, and then ready.
5. A running sequence that finds no free block takes those of another: one that runs moves to PREEMPTED and is computed again later,
   one that still receives ends with `Evicted`.
6. `update_from_output` caches computed blocks, publishes those that a receiver wants and appends sampled tokens. After its prompt
   a request forks into its n sequences; a transfer source ends here.
7. A last token, an abort or an error ends a sequence in any state (FINISHED_*) and frees its blocks; those that a transfer still
   uses stay pinned until it returns them. The end of a session's turn moves it to WAITING_FOR_STREAMING_REQ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.common.block_hash import BlockHasher
from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import Evicted, InvalidRequest, PdServeError, TransferFailed
from pdserve.common.request.engine_types import EngineCoreEventType, EngineCoreRequest
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.block_pool import BlockPool, PinTracker
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.async_scheduling import AsyncScheduling
from pdserve.engine.scheduler.draft_scheduling import DraftScheduling
from pdserve.engine.scheduler.kv_messages import IntoEngine, KvOutbox
from pdserve.engine.scheduler.output_collector import OutputCollector
from pdserve.engine.scheduler.preemption import Preemption
from pdserve.engine.scheduler.running_batch import BatchBuilder, RunningBatch
from pdserve.engine.scheduler.sequence_group import SequenceGroup
from pdserve.engine.scheduler.session_commands import SessionCommands
from pdserve.engine.scheduler.sessions import Sessions
from pdserve.engine.scheduler.step_results import FinishRequest, StepResults
from pdserve.engine.scheduler.store_lookups import LookedUp
from pdserve.engine.scheduler.tier_loads import NotLoaded, TierLoads
from pdserve.engine.scheduler.transfer_events import ComputeHere, End, KvSendTracker, Offer, TransferEvents
from pdserve.engine.scheduler.waiting.remote_kv_queue import Ready, RemoteKvQueue
from pdserve.engine.scheduler.waiting.starvation_guard import StarvationGuard
from pdserve.engine.scheduler.waiting.waiting_queues import Refusal, WaitingQueues
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, ModelRunnerOutput, SchedulerOutput
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.structured_output_manager import StructuredOutputManager


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching, preemption by recompute, and remote KV.

    The cost of a step grows with the number of scheduled sequences, not with the number of waiting ones (I10).
    """

    def __init__(
        self, config: EngineConfig, hasher: BlockHasher, connector: KvOutbox, compiler: GrammarCompiler | None = None
    ) -> None:
        self.config = config
        self.pool = BlockPool(
            *config.num_blocks_by_shape,
            enable_caching=config.enable_prefix_caching,
            num_host_blocks=config.num_host_blocks,
            has_store=config.has_block_store,
            shares_store=config.shares_block_store,
        )
        self.kv = KVCacheManager(self.pool, hasher, config.kv_cache_specs, config.largest_chunk)
        self.holds = PinTracker(self.pool)
        self.starvation = StarvationGuard(config.max_overtakes)
        self.loads = TierLoads(self.kv, self.holds, self._compute_s)
        self.receives = RemoteKvQueue(config, self.kv, self.holds, connector, self.starvation, self.loads)
        self.sources = KvSendTracker(self.kv, self.holds, connector)
        self.grammars = StructuredOutputManager(compiler, config.grammar_timeout_s)
        self.waiting = WaitingQueues(config, self.kv, self.starvation, self.loads, self.receives)
        self.outputs = OutputCollector()
        self.requests: dict[str, Request] = {}
        """Unfinished sequences, by `Request.request_id`."""
        self.running = RunningBatch(config.max_loras, config.encoder)
        self.preemption = Preemption(self.kv, self.running, self.waiting, self._evict)
        self.group = SequenceGroup(config, self.requests, self.kv, self.waiting, self.preemption)
        self.sessions = Sessions(config, self.kv, self.running, self.waiting, self.loads, self.grammars, self.outputs)
        self.finisher = FinishRequest(
            self.requests, self.kv, self.running, self.waiting, self.grammars, self.receives, self.loads, self.group,
            self.outputs,
        )  # fmt: skip
        self.drafts = DraftScheduling(config, self.kv, self.running)
        self.results = StepResults(
            self.requests, self.kv, self.running, self.sources, self.group, self.sessions, self.outputs, self.finisher,
            self.drafts,
        )  # fmt: skip
        self.events = TransferEvents(self.requests, self.holds, self.receives, self.sources, self.waiting)
        self.async_scheduling = AsyncScheduling(
            config, self.kv, self.running, self.waiting, self.receives, self.loads, self.grammars, self.drafts
        )
        self.session_commands = SessionCommands(self.requests, self.sessions, self.finisher, self.events)
        self.prefill_s = 0.0
        """Seconds of the steps that computed prompt tokens."""
        self.num_added = 0
        """Requests added since the start."""

    # ---- requests

    def add_request(self, core: EngineCoreRequest, refusal: InvalidRequest | None = None) -> None:
        """Add a validated request. A second one with the same id is dropped and counted.

        refusal: error that ends it at once, before anything is computed.
        """
        self.num_added += 1
        if self.group.has(core.request_id):
            self.events.num_dropped += 1
            return
        request = Request(core)
        if self.config.scheduling_policy == "fcfs":
            request.priority = 0
        else:
            request.order_by_time()
        self.requests[request.request_id] = request
        if Wait.GRAMMAR in request.waits_for:
            self.grammars.start(request)
        if Wait.REMOTE_KV in request.waits_for and not self._goes_local(request):
            self.receives.add(request)
        else:
            self.loads.begin_lookup(request)
            self._enter_if_free(request)
        if refusal is not None:
            self.sources.forget(request.request_id)
            self.finisher.fail(request, refusal)

    def _enter_if_free(self, request: Request) -> None:
        """Insert a request that waits for nothing into a queue."""
        if not request.waits_for:
            self.waiting.add(request)

    def _goes_local(self, request: Request) -> bool:
        """Prefill a request with a remote source here if that is cheaper; returns True if so. Decided on arrival; the router then
        cancels the prefill call."""
        if not self.waiting.prefers_local(request):
            return False
        request.settle_wait(Wait.REMOTE_KV)
        self.receives.cancel_remote(request)
        self.outputs.prefills_locally(request)
        return True

    def abort_request(self, request_id: str) -> Request | None:
        """End a request in any state; returns one of its sequences, None if all had ended."""
        self.sources.forget(request_id)
        living = self._living(request_id)
        for request in living:
            self.session_commands.abort(request)
        return living[0] if living else None

    def end_sequence(self, request_id: str, index: int, turn: int | None = None) -> None:
        """End one sequence, whose text is complete at the reader; other sequences continue. No effect if it has ended.

        A session ends its running turn. turn: number of turns before it, without effect on another turn; None: any turn.
        """
        for request in self._living(request_id):
            if request.core.resumable:
                if turn in (None, request.num_turns) and request.num_output_tokens:
                    self.session_commands.end_text(request)
            elif request.num_sequences > 1:
                request.ended_elsewhere.add(index)
            elif request.index == index:
                self.session_commands.end_text(request)

    def migrate(self, request_id: str, index: int, *, without_draft_head: bool) -> None:
        """End a sequence after its next token, for another worker to continue. No effect if it has ended, or on a session.

        without_draft_head: as `EngineCoreRequest.without_draft_head`.
        """
        for request in self._living(request_id):
            core = request.core
            if core.resumable or core.transfer_source or core.pooling_params is not None:
                self.events.num_dropped += 1
            else:
                request.migrations[index] = without_draft_head

    def _living(self, request_id: str) -> list[Request]:
        if siblings := self.group.of(request_id):
            return siblings
        request = self.requests.get(request_id)
        return [] if request is None else [request]

    def fail_request(self, request_id: str, cause: PdServeError) -> None:
        """End a request with an error. No effect if it has ended."""
        for request in self._living(request_id):
            self.finisher.fail(request, cause)

    def fail_all(self, cause: PdServeError) -> None:
        """End every request with an error."""
        for request in list(self.requests.values()):
            self.finisher.fail(request, cause)

    @property
    def has_work(self) -> bool:
        """True if a step may have work, now or after a grammar or a copy. Remote KV arrives as an event, not by steps."""
        return self.has_tokens_to_compute or len(self.grammars) > 0 or self.loads.has_copies

    @property
    def has_tokens_to_compute(self) -> bool:
        """True if a step may compute something now."""
        return bool(self.running) or len(self.waiting) > 0 or self.receives.num_unreserved > 0

    # ---- events from the transfer side

    def apply(self, event: IntoEngine) -> None:
        """Apply one event. Late, repeated and unknown events are counted and dropped (I9)."""
        outcome = self.events.apply(event)
        match outcome:
            case End():
                self.finisher.finish(outcome.request, outcome.status, cause=outcome.cause)
            case Offer():
                self._offered(outcome.request, outcome.num_blocks)
            case ComputeHere():
                self._compute_here(outcome.request, outcome.cause)
            case _:
                self._run_if_ready(outcome)

    def _offered(self, request: Request, num_blocks: int) -> None:
        """Let a request enter the queues: it is known what its source has."""
        most = (request.num_tokens - 1) // self.config.block_size
        is_readable = not request.core.without_draft_head and not request.skip_reading_prefix_cache
        if 0 < num_blocks <= most and is_readable:
            request.num_offered_blocks = num_blocks
        else:
            self.receives.cancel_remote(request)
        request.settle_wait(Wait.OFFER)
        if request.core.fetches_only and not request.num_offered_blocks:
            self._end_fetch(request)
        else:
            self._enter_if_free(request)

    def _end_fetch(self, request: Request, cause: PdServeError | None = None) -> None:
        """End a request that computes nothing. cause: what has ended its transfer."""
        self.finisher.finish(request, RequestStatus.FINISHED_STOPPED, cause=cause)

    def _compute_here(self, request: Request, cause: PdServeError) -> None:
        """Let a sequence wait for its admission again, without the blocks that were being fetched; what has landed is cached."""
        if request.core.fetches_only:
            self._end_fetch(request, cause)
            return
        self.receives.stop(request, cause)
        self.loads.stop(request)
        self.kv.free(request)
        request.num_computed_tokens = 0
        request.settle_wait(Wait.REMOTE_KV)
        self.waiting.add(request)

    def copies_finished(self, ends: Sequence[CopyEnd | LookupEnd]) -> None:
        """Continue the sequences whose blocks have come from the tiers, or were looked up there."""
        for request in self.loads.finished(ends):
            if isinstance(request, NotLoaded | LookedUp):
                self._go_on_without(request)
            elif Wait.REMOTE_KV in request.waits_for:
                self._run_if_ready(self.receives.loaded(request))
            else:
                request.move_to(RequestStatus.WAITING)
                self.waiting.add_ready(request)

    def _go_on_without(self, waited: NotLoaded | LookedUp) -> None:
        """Let a sequence wait for its admission, whatever the store has brought or found."""
        if isinstance(waited, NotLoaded):
            self._wait_again(waited)
        else:
            self._enter_if_free(waited.request)

    def _wait_again(self, not_loaded: NotLoaded) -> None:
        """Let a sequence wait for its admission again, without the blocks that the store did not bring."""
        request = not_loaded.request
        self.kv.free(request)
        request.num_computed_tokens = 0
        if not_loaded.was_preempted:
            request.move_to(RequestStatus.PREEMPTED)
            self.waiting.add_preempted(request)
        else:
            request.move_to(RequestStatus.WAITING)
            self.waiting.add(request)

    def _compute_s(self, num_tokens: int) -> float | None:
        """Seconds that so many prompt tokens take in the mean; None before the first."""
        return num_tokens * self.prefill_s / self.num_computed_prompt_tokens if self.prefill_s else None

    def _run_if_ready(self, ready: Ready | None) -> None:
        if ready is None:
            return
        request, first_tokens = ready
        request.settle_wait(Wait.REMOTE_KV)
        if request.core.fetches_only:
            self._end_fetch(request)
        elif not request.core.remote_prefill:
            self.waiting.add_ready(request)
        elif request.waits_for:
            self.grammars.hold(request, first_tokens)
        else:
            self._start_decoding(request, first_tokens)

    def _start_decoding(self, request: Request, first_tokens: Sequence[int]) -> None:
        """Continue a request whose KV has landed, with the first token of each of its sequences."""
        sequences = self.group.fork(request, first_tokens)
        if sequences is None:
            failure = None if request.grammar is None else request.grammar.failure
            unfit = TransferFailed("the source's first token does not fit the request's grammar")
            self.finisher.fail(request, failure or unfit)
            return
        for sequence, ended_with in sequences:
            if ended_with is not None:
                self.finisher.finish(sequence, ended_with)
            elif sequence is request:
                self.waiting.add_ready(request)

    # ---- grammars

    def _take_grammars(self) -> None:
        for request, grammar in self.grammars.take():
            if isinstance(grammar, PdServeError):
                self.finisher.fail(request, grammar)
                continue
            request.grammar = grammar
            request.settle_wait(Wait.GRAMMAR)
            if grammar.has_ended:
                self.session_commands.end_text(request)
            elif (first_tokens := self.grammars.first_tokens(request)) is not None:
                self._start_decoding(request, first_tokens)
            else:
                self._enter_if_free(request)

    def _look_at_grammars(self) -> None:
        """Receive arrived masks, and end sequences whose grammar has ended or failed."""
        self.grammars.hosts.flush()
        self.grammars.hosts.receive()
        for request, grammar in self.running.with_grammars():
            if (failure := grammar.failure) is not None:
                self.finisher.fail(request, failure)
            elif grammar.has_ended:
                self.session_commands.end_text(request)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes. Changes block tables; `update_from_output` must follow a step."""
        step = BatchBuilder(self.config.max_num_batched_tokens)
        self.running.encoder.begin_step()
        self._take_grammars()
        self._look_at_grammars()
        for late in self.loads.overdue():
            self._go_on_without(late)
        self.receives.reserve(self.running.values(), self.waiting.num_ready + self.grammars.num_landed)
        decoding, prefilling, running_ahead = self.running.by_phase()
        # decoding sequences precede prefilling ones, so that a long prompt does not stall all streams
        self._schedule_running(step, decoding)
        self._schedule_running(step, prefilling)
        self._schedule_waiting(step)
        has_tried_all = step.budget > 0 and not step.preempted
        self._schedule_running(step, running_ahead)
        step.output.finished_req_ids = self.running.take_finished_ids()
        step.output.scheduled_new_reqs = [
            self.running.new_request_data(request, self.kv.block_rows(request), self.drafts.limit(request))
            for request in step.new_requests
        ]
        if step.output.num_scheduled_tokens:
            step.output.lora_loads = self.running.lora_slots.take_loads()
            step.output.scheduled_encoder_inputs, step.output.free_encoder_mm_hashes = (
                self.running.encoder.take_changes()
            )
            step.output.block_copies = self.kv.take_copies()
            if self.kv.has_states:
                step.output.tentative_req_ids = self._tentative(step.output)
        self.loads.fill(step.output)
        self.async_scheduling.scheduled(has_tried_all=has_tried_all)
        return step.output

    def _tentative(self, scheduled: SchedulerOutput) -> list[str]:
        """See `SchedulerOutput.tentative_req_ids`."""
        return [
            req_id
            for req_id in scheduled.num_scheduled_tokens
            if req_id in scheduled.scheduled_spec_decode_tokens or self._takes_mask(scheduled, req_id)
        ]

    def _takes_mask(self, scheduled: SchedulerOutput, req_id: str) -> bool:
        """True if a step computes the last known token of a sequence with a grammar."""
        request = self.requests[req_id]
        num_known = scheduled.num_scheduled_tokens[req_id] - scheduled.num_drafts(req_id)
        return request.grammar is not None and request.num_uncomputed_tokens == num_known

    def get_grammar_bitmask(self, scheduled: SchedulerOutput) -> GrammarOutput | None:
        """Masks for the sequences that a step completes; None if it needs none. Called while the step computes; may wait
        `MASK_WAIT_S`."""
        takers = [
            self.requests[req_id] for req_id in scheduled.num_scheduled_tokens if self._takes_mask(scheduled, req_id)
        ]
        return self.grammars.grammar_output(takers, scheduled.num_drafts) if takers else None

    def _schedule_running(self, step: BatchBuilder, requests: list[Request]) -> None:
        for request in requests:
            num_tokens = self.config.chunk(request.num_uncomputed_tokens, step.budget)
            num_tokens = self.kv.chunk(request, request.num_computed_tokens, num_tokens)
            if num_tokens <= 0 or request.status is not RequestStatus.RUNNING:
                continue
            if request.computes_one_token and self.kv.has_room(request, request.num_tokens):
                step.put(request, 1)
                continue
            if request.grammar is not None and not request.grammar.is_prompt:
                continue  # this sequence waits for its mask; the others continue
            encoded = self.running.encoder.plan(request, request.num_computed_tokens, num_tokens)
            if not (num_tokens := encoded.num_tokens):
                continue  # its next image waits for room
            drafts = self.drafts.of_step(step, request)
            room = self.waiting.room(request, request.num_computed_tokens, num_tokens + len(drafts))
            added = self.preemption.make_room(step, request, room)
            if added is not None:
                self.running.encoder.commit(request, encoded)
                step.put(request, num_tokens)
                if drafts:
                    step.put_drafts(request, drafts)
                if added:
                    step.output.scheduled_cached_reqs.new_block_ids[request.request_id] = added

    def _evict(self, taker: Request) -> bool:
        """Evict a sequence that waits for remote KV in favour of a running one.

        Returns True if blocks will be returned, after the reads into them end.
        """
        if self.receives.returns_room:
            return True
        victim = self.receives.victim(taker)
        if victim is None:
            return False
        self.receives.expect_room()
        cause = Evicted("running sequences needed the blocks that were reserved for it")
        if victim.core.remote_prefill:
            self.finisher.fail(victim, cause)
        else:
            self._compute_here(victim, cause)
        return True

    def _schedule_waiting(self, step: BatchBuilder) -> None:
        if self._is_full(step):
            return
        candidates = self.waiting.candidates(after_preemption=step.preempted)
        for request in candidates:
            if self._is_full(step):
                return
            admitted = self._try_admit(step, request)
            if (
                admitted in (Refusal.NO_ROOM, Refusal.NO_LORA_SLOT, Refusal.NO_ENCODER_ROOM)
                and request.is_pinned_source
                and self.preemption.give_way(step)
            ):
                admitted = self._try_admit(step, request)
            candidates.num_without_room += admitted is Refusal.NO_ROOM
            if isinstance(admitted, PdServeError):
                self.finisher.fail(request, admitted)
            elif admitted is Refusal.NOTHING_TO_FETCH:
                self._end_fetch(request)
            elif not isinstance(admitted, Refusal):
                request.move_to(RequestStatus.RUNNING)
                request.mark("scheduled")
                request.note(EngineCoreEventType.SCHEDULED)
                self.running.enter(request)
                step.schedule_new(request, admitted)
                self.sources.publish(request)

    def _try_admit(self, step: BatchBuilder, request: Request) -> int | Refusal | PdServeError:
        num_growing = self.running.num_growing + self.receives.num_parked + self.grammars.num_landed
        return self.waiting.try_admit(request, step.budget, self.running, num_growing)

    def _is_full(self, step: BatchBuilder) -> bool:
        return step.budget <= 0 or len(self.running) >= self.config.max_num_seqs

    # ---- results

    def step_launched(self, kv_written: DeviceEvent | None) -> None:
        """Note that a step runs. kv_written: on a GPU, the event after which its KV is in the pool."""
        self.receives.launched_event = kv_written

    def update_from_output(
        self, scheduled: SchedulerOutput, computed: ModelRunnerOutput, kv_written: DeviceEvent | None = None
    ) -> None:
        """Apply a step's result: cache and publish KV, append tokens, end sequences.

        kv_written: on a GPU, the event after which the step's KV is in the pool.
        """
        self.sources.device_event = kv_written
        self.results.update(scheduled, computed)

    def drop_states(self, launched: Mapping[str, Request], scheduled: SchedulerOutput) -> None:
        """Drop the states of sessions whose turn ended after a step was launched that computes one token more.

        launched: the step's sequences then. scheduled: the step without those that have ended.
        """
        for req_id, request in launched.items():
            if req_id not in scheduled.num_scheduled_tokens and self.requests.get(req_id) is request:
                self.kv.drop_state(request)

    def requeue_finished_ids(self, unused: SchedulerOutput) -> None:
        """Report the finished ids of an unused, empty step with the next one."""
        self.running.requeue_finished_ids(unused.finished_req_ids)

    def forget_history(self) -> None:
        """Reset the counters and the prefix cache, but for what lies in the store."""
        self.pool.forget_cached(keeps_store=True)
        self.prefill_s = 0.0
        self.num_added = 0
        self.drafts.forget_history()
        self.results.num_computed_prompt_tokens = self.kv.num_queried_tokens = self.kv.num_hit_tokens = 0

    # ---- statistics

    @property
    def num_preemptions(self) -> int:
        return self.preemption.num_preemptions

    @property
    def num_computed_prompt_tokens(self) -> int:
        return self.results.num_computed_prompt_tokens

    @property
    def num_dropped_events(self) -> int:
        return self.events.num_dropped

    def check(self, *, idle: bool = False) -> None:
        """Check the block pool (I2). idle: no block may be in use. Raises: PoolCorrupt."""
        references = self.kv.references()
        for block, count in self.holds.references().items():
            references[block] = references.get(block, 0) + count
        self.pool.check(references)
        self.loads.check()
        self.running.encoder.cache.check(idle=idle)
        if idle and (self.requests or self.pool.num_in_use):
            raise RuntimeError(f"idle with {len(self.requests)} requests and {self.pool.num_in_use} blocks in use")
