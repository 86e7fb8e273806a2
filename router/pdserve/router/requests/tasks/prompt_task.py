"""One request from its prompt to its last token: prepared, placed, and attempted until it ends."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec

from pdserve.common import timeline as moments
from pdserve.common.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    Evicted,
    InternalError,
    InvalidRequest,
    PdServeError,
    WorkerLost,
)
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.structured_outputs import FIELD as STRUCTURED_OUTPUTS
from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.place import Cost, RunningPlace
from pdserve.router.attempts.attempt import Attempt
from pdserve.router.attempts.attempt_failure import AttemptFailed, FullWorkers, PrefillNeeded, backoff_s
from pdserve.router.attempts.call_events import Outputs, PromptLogprobs
from pdserve.router.attempts.crash_guard import CrashGuard
from pdserve.router.placement.placement import PlacementHint
from pdserve.router.placement.routing_decision import RoutingDecision
from pdserve.router.requests.client_error import as_client_sees
from pdserve.router.requests.client_stream import ClientStream
from pdserve.router.requests.preparation import ClientRequest, HashedRequest, Limits
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.tasks.retry_state import RetryState
from pdserve.router.requests.usage import Usage
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.text.best_of import best
from pdserve.text.outputs.output_processor import OutputProcessor, PositionConflict
from pdserve.text.outputs.request_output import CompletionOutput

log = logging.getLogger(__name__)

WAIT_FOR_WORKER_S = 5.0
"""Seconds for which a request waits for a worker that may serve it, if none is being started (`Fleet.wait_for_worker`)."""
MAX_EVICTIONS = 16
"""Evictions of one request that do not count as failed attempts: each let other sequences continue."""


class PromptTask:
    """Serves one prompt into the choices of a client's stream that belong to it. `run` once.

    A session's turn has the same life from tokens to metrics; it overrides `token_ids_before`, `attempts`, `raise_when_no_worker`.
    """

    def __init__(
        self,
        request_id: str,
        first_choice: int,
        request: ClientRequest,
        stream: ClientStream,
        services: RequestServices,
        record: RequestTrace,
    ) -> None:
        self.request_id = request_id
        self.usage = Usage()
        self.timeline = Timeline()
        self._first_choice = first_choice
        self._request = request
        self._stream = stream
        self._services = services
        self.num_choices = request.sampling_params.n
        """Sequences that the client gets."""
        self.num_sequences = request.sampling_params.num_sequences
        self._processor: OutputProcessor | None = None
        self._holds: RunningPlace | None = None
        self._prepared: dict[tuple[str, int, int, int], HashedRequest] = {}
        """(layout, sequence, length of the client's output) -> hashed request."""
        self._begun: set[int] = set()
        """Sequences of which the client has output."""
        self._numbers = itertools.count()
        """Numbers of attempts."""
        self._crash_guard = CrashGuard(
            services.deny_list, services.fleet, services.company, request.client, request.sampling_params
        )
        self._full = FullWorkers(services.settings.limits.queue_timeout_s)
        self._record = record.run(self.timeline)

    async def run(self) -> None:
        """Push everything, then end the choice; every error but cancellation ends in the stream."""
        try:
            async with asyncio.timeout(self._request.timeout_s) as deadline:
                self._record.deadline = deadline
                with self._services.preparation.holding_images(self._request):
                    await self._serve()
            self._stream.end_run()
        except TimeoutError:
            self._fail(self.too_late() if deadline.expired() else InternalError("something timed out in the router"))
        except PdServeError as error:
            self._fail(self._in_the_clients_words(error))
        except Exception:
            log.exception("request %s failed in the router", self.request_id)
            self._fail(InternalError("internal error; the router's log has the details"))

    def _fail(self, error: PdServeError) -> None:
        self._record.error = error
        self._stream.fail(as_client_sees(error, self.request_id))

    def _in_the_clients_words(self, error: PdServeError) -> PdServeError:
        """The parameters with the form as `structured_outputs`, by whatever field the client asked for it."""
        field = self._request.constraint_field
        if isinstance(error, InvalidRequest) and error.field == STRUCTURED_OUTPUTS != field:
            return type(error)(f"{field}: {error.message}", field)
        return error

    @property
    def timeout_s(self) -> float:
        """The client's deadline, seconds from the start of the request."""
        return self._request.timeout_s

    async def _serve(self) -> None:
        before = self.token_ids_before
        token_ids = await self._services.preparation.tokenize(self._request, self._limits_now(), len(before))
        bad_words, limits = await self._services.preparation.bad_words(self._request), await self._limits()
        request = self._services.preparation.complete(
            self.request_id, self._request, token_ids, limits, bad_words, len(before)
        )
        token_ids = request.prompt_token_ids
        self.usage.prompt_tokens = len(before) + len(token_ids)
        self._stream.expect_prompt_token_ids(self.usage.prompt_tokens)
        if (asked := request.sampling_params.prompt_logprobs) is not None:
            self._stream.expect_prompt_logprobs(self.usage.prompt_tokens * (asked + 1) * self.num_choices)
        self._processor = OutputProcessor(
            self._services.preparation.tokenizer,
            request_id=self.request_id,
            prompt=None,
            prompt_token_ids=[*before, *token_ids] if before else request.known_prompt_token_ids,
            sampling_params=request.sampling_params,
            num_sequences=self.num_sequences,
            num_tokens_before=len(before),
            continues_prompt=limits.room.continues_prompt,
        )
        self.timeline.mark(moments.TOKENIZED)
        self._record.tokenized(self.usage.prompt_tokens)
        priority = request.priority if self._services.settings.scheduling_policy == "priority" else 0
        cost = Cost(
            num_blocks=self._services.num_prompt_blocks(self.usage.prompt_tokens),
            num_places=self.num_sequences,
            # what a session has computed before is not computed again
            num_tokens=len(token_ids),
            num_encoder_tokens=self._services.num_encoder_tokens,
            max_tokens=request.sampling_params.output_limit,
        )
        async with self._services.admission.place(
            cost,
            priority,
            lambda: self.raise_when_no_worker(one_token=request.sampling_params.output_limit == 1),
            client=self._request.client,
        ) as self._holds:
            self.timeline.mark(moments.ADMITTED)
            self._record.admitted()
            adapted = await self._services.models.with_adapter(request, WAIT_FOR_WORKER_S)
            await self.attempts(adapted, self._processor, RetryState())

    @property
    def token_ids_before(self) -> list[int]:
        """The output so far, which the next attempt continues; the caller must not change it."""
        return []

    async def attempts(self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState) -> None:
        """Run attempts until one serves the request, each from the end of the client's text.

        Raises: PdServeError.
        """
        while True:
            started_unix_ns = now_unix_ns()
            number = next(self._numbers)
            resumed = self._resumed(request, processor, retry_state)
            decision = await self.place(resumed, number, retry_state)
            placement = decision.placement
            self.timeline.mark(moments.PLACED)
            self._record.routed(started_unix_ns, decision.policy, placement, decision.attributes)
            layout = placement.layout
            prompt_digest = self.hashed(request, layout).request.request_digest
            self._services.deny_list.check(self._request.client, prompt_digest)
            prepared = self.hashed(resumed, layout).request
            if not prepared.remaining_s:
                # workers refuse a request without time
                raise self.too_late()
            record = self._record.attempt(number, placement, len(resumed.output_token_ids))
            if self._holds is not None:
                self._holds.placed()
            if (
                not request.sampling_params.greedy
                and len(placement.sampler_versions | retry_state.sampler_versions) > 1
            ):
                self._record.sampled_by_other()
            num_tokens = processor.num_output_tokens
            attempt = Attempt(
                number, record.with_trace_headers(prepared), placement, self.timeline, self.relay, self._relay_prompt
            )
            try:
                with record, self._services.company.serving(self._crash_guard, placement):
                    await attempt.run()
                self._services.selector.bandwidth.landed(attempt.transfer_bytes, self.timeline)
                return
            except PrefillNeeded as needed:
                retry_state.hint, retry_state.blamed = PlacementHint.REMOTE, frozenset()
                retry_state.num_uncounted += 1
                if retry_state.num_uncounted <= self._services.settings.limits.max_attempts:
                    continue
                failure = AttemptFailed(WorkerLost(f"decode asks for prefill again and again: {needed}"))
            except AttemptFailed as failed:
                failure = failed
            if processor.num_output_tokens > num_tokens and not request.sampling_params.greedy:
                retry_state.sampler_version = placement.sampler_version
            if (full := failure.refused_by) is not None:
                await self._full.refused(full, failure.error)
                continue
            if isinstance(failure.error, Evicted) and retry_state.num_evictions < MAX_EVICTIONS:
                retry_state.num_evictions += 1
            else:
                retry_state.num_counted += 1
            told = self.request_id, number, processor.num_output_tokens, failure
            log.info("request %s: attempt %d failed after %d tokens: %s", *told)
            retry_state.hint = self._after(failure, prompt_digest, retry_state.num_counted)
            retry_state.blamed = frozenset() if failure.blamed is None else frozenset((failure.blamed.key,))
            if resumed is request and not processor.num_output_tokens and isinstance(failure.error, AdapterUnavailable):
                refused_by, self._prepared = retry_state.blamed, {}
                request = await self._services.models.after_refusal(request, refused_by, WAIT_FOR_WORKER_S)
            await asyncio.sleep(backoff_s(retry_state.num_counted + retry_state.num_evictions))
            if self.num_sequences > 1 and retry_state.index is None and processor.num_output_tokens:
                await self._go_on_apart(request, processor, retry_state)
                return

    async def _go_on_apart(
        self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState
    ) -> None:
        """Continue each unfinished sequence in attempts of its own, since the sequences now differ."""
        try:
            async with asyncio.TaskGroup() as group:
                for index in processor.unfinished_indices:
                    alone = msgspec.structs.replace(retry_state, index=index)
                    group.create_task(self._attempts_alone(request, processor, alone))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _attempts_alone(
        self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState
    ) -> None:
        try:
            await self.attempts(request, processor, retry_state)
        except PdServeError as error:
            # it ends the other sequences, too
            self._record.error = self._record.error or error
            raise

    def _resumed(
        self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState
    ) -> GenerationRequest:
        """The next attempt's request: the one sequence that is served, after the client's tokens, or all from the beginning."""
        if retry_state.index is None and (self.num_sequences > 1 or not processor.num_output_tokens):
            return request
        index = retry_state.index or 0
        output_token_ids = list(processor.output_token_ids(index))
        return msgspec.structs.replace(request, index=index, n=1, output_token_ids=output_token_ids)

    def _after(self, failure: AttemptFailed, prompt_digest: bytes, num_counted: int) -> PlacementHint:
        """Parameters of the next attempt. Raises the failure's error when there is none."""
        error = failure.error
        self._crash_guard.count(failure, prompt_digest)
        if (
            not error.retryable
            or isinstance(error, PositionConflict)
            or num_counted >= self._services.settings.limits.max_attempts
        ):
            raise error
        if failure.in_transfer:
            if (answer := self._services.settings.on_kv_failure) == "fail":
                raise error
            return PlacementHint(answer)
        return PlacementHint.REMOTE if isinstance(error, Evicted) else PlacementHint.ANY

    def relay(self, outputs: Outputs) -> bool:
        """Give the client what is new; see `Attempt`."""
        processor = self._processor
        if processor is None:
            raise InternalError("outputs came before the request was prepared")
        delta = processor.process(
            outputs.index,
            outputs.first_position,
            outputs.token_ids,
            outputs.finish_reason,
            outputs.stop_token_id,
            outputs.logprobs,
        )
        if delta is None:
            return processor.states[outputs.index].finished
        has_ended, num_tokens = delta.finish_reason is not None, len(delta.token_ids)
        if not self.usage.completion_tokens:
            self._begin(outputs.num_cached_tokens)
        if self._holds is not None:
            self._holds.produced(num_tokens)
        self.usage.completion_tokens += num_tokens
        self._record.relayed(delta.index, num_tokens, outputs.num_cached_tokens)
        if has_finished := has_ended and processor.finished:
            self.timeline.mark(moments.FINISHED)
            self._record.finish_reason = str(delta.finish_reason)
        if self.num_sequences == self.num_choices:
            self._push(delta)
        elif has_finished:
            for output in best(processor.request_output().outputs, self._request.sampling_params):
                self._push(output)
        return has_ended

    def _begin(self, num_cached_tokens: int) -> None:
        """Note the first token."""
        self.timeline.mark(moments.FIRST_TOKEN)
        if not self._request.cache.is_shared:
            self.usage.cached_tokens = min(num_cached_tokens, self.usage.prompt_tokens)
        # its prompt is computed: there may be room for another's
        self._services.admission.recheck()

    def _relay_prompt(self, piece: PromptLogprobs) -> None:
        if self._processor is not None:
            self._processor.add_prompt_logprobs(piece.first_position, piece.logprobs)

    def _push(self, output: CompletionOutput) -> None:
        if self._processor is not None and output.index not in self._begun:
            self._begun.add(output.index)
            output.prompt_token_ids = self._processor.prompt_token_ids
            output.prompt_logprobs = self._processor.prompt_logprobs
        output.index += self._first_choice
        self._stream.push(output)

    def _limits_now(self) -> Limits | None:
        """None while no worker is known."""
        return Limits.of(worker for role in WorkerRole for worker in self._services.fleet.workers(role))

    async def _limits(self) -> Limits:
        if (limits := await self._services.fleet.wait_for_worker(self._limits_now, WAIT_FOR_WORKER_S)) is None:
            raise self._no_worker()
        return limits

    async def place(self, request: GenerationRequest, attempt: int, retry_state: RetryState) -> RoutingDecision:
        num_resumed = len(request.output_token_ids)

        def look() -> RoutingDecision | None:
            return self._services.selector.place(
                self.request_id,
                attempt,
                tenant=self._request.client.tenant,
                num_tokens=len(request.prompt_token_ids) + num_resumed,
                num_encoder_tokens=self._services.num_encoder_tokens,
                max_tokens=request.sampling_params.output_limit - num_resumed,
                hashes=lambda layout: self.hashed(request, layout).placement_hashes,
                hint=retry_state.hint,
                blamed=retry_state.blamed | self._full.keys,
                dead=self._crash_guard.unfit,
                sampler_version=retry_state.sampler_version,
                data_parallel_rank=self._request.data_parallel_rank,
                adapter=(request.lora_name, request.lora_fingerprint),
            )

        while (decision := await self._services.fleet.wait_for_worker(look, WAIT_FOR_WORKER_S)) is None:
            if self._crash_guard.unfit == self._crash_guard.workers:
                raise self._no_worker()
        return decision

    async def raise_when_no_worker(self, *, one_token: bool) -> None:
        """Runs while the request waits for a place. Never returns; raises WorkerLost when no worker could serve it for 5 s."""
        await self._services.fleet.wait_until_absent(
            lambda: self._services.selector.has_workers(one_token=one_token), WAIT_FOR_WORKER_S
        )
        raise self._no_worker()

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request was not done within {self._request.timeout_s:g} s")

    def _no_worker(self) -> WorkerLost:
        roles = "; ".join(self._services.fleet.describe(role) for role in WorkerRole)
        also = ", and local_prefill is never" if self._services.settings.local_prefill == "never" else ""
        also += f", for adapter {self._request.lora_name!r}" if self._request.lora_name else ""
        return WorkerLost(f"no worker could serve this within {WAIT_FOR_WORKER_S:g} s: {roles}{also}").for_clients()

    def hashed(self, request: GenerationRequest, layout: KvLayout) -> HashedRequest:
        """For blocks of this layout; generations of a model differ in them."""
        place = (request.index, len(request.output_token_ids)) if request.is_resumed else (-1, 0)
        key = (layout.model_fingerprint, layout.block_size, *place)
        if key not in self._prepared:
            # a beam search hashes as many requests per step as it has beams
            prompt = self._prepared.get((*key[:2], -1, 0))
            self._prepared[key] = self._services.preparation.hashed(request, self._request.cache, layout, prompt)
        return self._prepared[key]
