"""`PromptTask`: one prompt and the text that follows it, into the stream of its client."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.common import timeline as moments
from pdserve.common.errors import Draining, InternalError, InvalidRequest, Overloaded, PdServeError, WorkerLost
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.structured_outputs import FIELD as STRUCTURED_OUTPUTS
from pdserve.common.timeline import Timeline
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.place import Cost
from pdserve.router.attempts.attempt import Attempt
from pdserve.router.attempts.call_events import Outputs, PromptLogprobs
from pdserve.router.attempts.fetch_call import fetch
from pdserve.router.attempts.migration import Migrated, MigrationSource
from pdserve.router.placement.placement import BlockRead, Placement
from pdserve.router.requests.client_stream import ClientStream
from pdserve.router.requests.preparation import ClientRequest, ServedLimits
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.tasks.placed_task import PlacedTask
from pdserve.router.requests.tasks.retry_state import RetryState
from pdserve.router.requests.tasks.sequence_move import SequenceMove
from pdserve.router.requests.usage import Usage
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import RemoteWorker
from pdserve.text.best_of import best
from pdserve.text.outputs.output_processor import OutputProcessor
from pdserve.text.outputs.request_output import CompletionOutput

log = logging.getLogger(__name__)

FETCH_AHEAD_LIMIT_S = 10.0
"""Seconds within which blocks of a sequence that is to move are copied while it still runs; the rest is copied after it."""
FETCH_AGAIN_BLOCKS = 4
"""Blocks that a sequence fills while its blocks are copied, above which those are copied, too, before it moves."""
MAX_FETCHES = 4
"""Of one sequence, each shorter than the one before unless it fills blocks faster than they travel."""


class PromptTask(PlacedTask[None]):
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
        timeline = Timeline()
        super().__init__(request_id, request, services, record.run(timeline), timeline, Usage())
        self._first_choice = first_choice
        self._stream = stream
        self.num_choices = request.sampling_params.n
        """Sequences that the client gets."""
        self.num_sequences = request.sampling_params.num_sequences
        self._processor: OutputProcessor | None = None
        self._begun: set[int] = set()
        """Sequences of which the client has output."""
        self._was_cached = False
        """True if a part of the prompt was cached where it was computed."""

    async def run(self) -> None:
        """Push everything, then end the choice; every error but cancellation ends in the stream."""
        try:
            await self.served()
            self._stream.end_run()
        except PdServeError as error:
            self._stream.fail(error)

    def _in_the_clients_words(self, error: PdServeError) -> PdServeError:
        """The parameters with the form as `structured_outputs`, by whatever field the client asked for it."""
        field = self._request.constraint_field
        if isinstance(error, InvalidRequest) and error.field == STRUCTURED_OUTPUTS != field:
            return type(error)(f"{field}: {error.message}", field)
        return error

    async def serve(self) -> None:
        with self._services.preparation.holding_images(self._request):
            await self._serve()

    async def _serve(self) -> None:
        before = self.token_ids_before
        token_ids = await self._services.preparation.tokenize(
            self._request, ServedLimits.of(self.workers()), len(before)
        )
        bad_words, limits = await self._services.preparation.bad_words(self._request), await self.limits()
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
            flex_id=self._request.flex_id,
        ) as self._holds:
            self.timeline.mark(moments.ADMITTED)
            self._record.admitted()
            adapted = await self._services.models.with_adapter(request, self.patience_s)
            await self.attempts(adapted, self._processor, RetryState())
            if not before:
                self._remember(adapted, self._processor)

    def _remember(self, request: GenerationRequest, processor: OutputProcessor) -> None:
        """Its blocks are cached where it was served, and a later prompt may begin with them."""
        if self._services.settings.block_moves != "never" and not self._services.num_encoder_tokens:
            recent, output = self._services.cache_moves.recent, processor.output_token_ids(0)
            recent.add(request, self._request.cache, output, was_cached=self._was_cached)

    @property
    def token_ids_before(self) -> list[int]:
        """The output so far, which the next attempt continues; the caller must not change it."""
        return []

    async def attempts(self, request: GenerationRequest, processor: OutputProcessor, retry_state: RetryState) -> None:
        """Run attempts until one serves the request, each from the end of the client's text.

        Raises: PdServeError.
        """
        await self.until_served(request, retry_state)

    @property
    def processor(self) -> OutputProcessor:
        """Raises: InternalError before the request was prepared."""
        if self._processor is None:
            raise InternalError("outputs came before the request was prepared")
        return self._processor

    @property
    def num_output_tokens(self) -> int:
        return self.processor.num_output_tokens

    async def attempt(
        self, number: int, prepared: GenerationRequest, placement: Placement, source: MigrationSource | None
    ) -> None:
        # of a sequence that goes on, only the end belongs to the path of its request
        timeline = self.timeline if source is None else Timeline()
        attempt = Attempt(number, prepared, placement, timeline, self.relay, self._relay_prompt, source)
        try:
            if placement.decode is None:
                await attempt.run()
            else:
                move = functools.partial(self._move, attempt, prepared)
                with SequenceMove(placement.decode, move, lambda: self.num_output_tokens):
                    await attempt.run()
        finally:
            if source is not None:
                self._record.migrated(attempt.pause_s)
                if attempt.pause_s is not None:
                    self._services.rebalancing.paused(attempt.pause_s)
        if (finished := timeline.moments_unix_ns.get(moments.DECODE_FINISHED)) is not None:
            self.timeline.merge({moments.DECODE_FINISHED: finished})
        self._services.selector.bandwidth.landed(attempt.transfer_bytes, timeline)
        self._services.selector.moves.ended(placement.move, timeline, self._record.cached_tokens.total)

    async def _move(self, attempt: Attempt, prepared: GenerationRequest, worker: RemoteWorker) -> bool:
        """Have another decode worker continue an attempt's sequences: full blocks are copied while tokens flow. False: they stay,
        since no worker takes them now."""
        fleet, retry_state = self._services.fleet, RetryState(sampler_version=worker.identity.sampler_version)
        async with worker.migration_room:
            plan = functools.partial(self._look, prepared, attempt.number, retry_state, worker)
            if (decision := await fleet.wait_for(plan, prepared.remaining_s)) is None:
                return False
            receiver = decision.placement.decode
            if receiver is None:
                return False
            indexes = [prepared.index] if prepared.n == 1 else self.processor.unfinished_indices
            try:
                async with asyncio.timeout(FETCH_AHEAD_LIMIT_S):
                    for index in indexes:
                        await self._fetch_ahead(prepared, index, worker, receiver)
            except TimeoutError:
                log.info("request %s: not all blocks were copied within %g s", self.request_id, FETCH_AHEAD_LIMIT_S)
            except CallFailed as failure:
                problem = f"{receiver} did not copy its blocks ahead: {failure.error.message}"
                if isinstance(failure.error, Draining):
                    receiver.refuse_more()
                if failure.died or isinstance(failure.error, Draining | Overloaded | WorkerLost):
                    log.info("request %s stays for now: %s", self.request_id, problem)
                    return False
                log.warning("request %s: %s", self.request_id, problem)
            attempt.migrate(receiver)
            return True

    async def _fetch_ahead(
        self, prepared: GenerationRequest, index: int, source: RemoteWorker, receiver: RemoteWorker
    ) -> None:
        """Copy what the source has of a sequence, and what it has added meanwhile; the rest is copied when it has ended there.

        Raises: CallFailed.
        """
        num_fetched: int | None = None
        for _ in range(MAX_FETCHES):
            output = list(self.processor.output_token_ids(index))
            again = FETCH_AGAIN_BLOCKS * receiver.identity.layout.block_size
            if num_fetched is not None and len(output) - num_fetched < again:
                return
            known = msgspec.structs.replace(prepared, output_token_ids=output, index=index, n=1)
            request = msgspec.structs.replace(
                self.hashed(known, receiver.identity.layout).request,
                # one more, for which there is room: it still runs
                sampling_params=SamplingParams(max_tokens=len(output) + 1),
                index=0,
            )
            read = BlockRead(source=source, limit_s=FETCH_AHEAD_LIMIT_S)
            await fetch(receiver, request, next(self._numbers), read)
            num_fetched = len(output)

    async def _go_on_migrated(self, request: GenerationRequest, retry_state: RetryState, migrated: Migrated) -> bool:
        if self.num_sequences == 1 or retry_state.index is not None:
            [retry_state.source] = migrated.sources.values()
            return False
        states = [
            msgspec.structs.replace(retry_state, index=index, source=source)
            for index, source in migrated.sources.items()
        ]
        await self._in_attempts_of_their_own(request, states)
        return True

    async def _go_on_apart(self, request: GenerationRequest, retry_state: RetryState) -> bool:
        """Since the sequences now differ, once the client has output of them."""
        if self.num_sequences == 1 or retry_state.index is not None or not self.num_output_tokens:
            return False
        states = [msgspec.structs.replace(retry_state, index=index) for index in self.processor.unfinished_indices]
        await self._in_attempts_of_their_own(request, states)
        return True

    async def _in_attempts_of_their_own(self, request: GenerationRequest, states: Sequence[RetryState]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for state in states:
                    group.create_task(self._attempts_alone(request, state))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for state in states:  # also of those that were cancelled before they began
                state.end_migration()

    async def _attempts_alone(self, request: GenerationRequest, retry_state: RetryState) -> None:
        try:
            await self.attempts(request, self.processor, retry_state)
        except PdServeError as error:
            # it ends the other sequences, too
            self._record.error = self._record.error or error
            raise

    def _resumed(self, request: GenerationRequest, retry_state: RetryState) -> GenerationRequest:
        """The one sequence that is served, after the client's tokens, or all from the beginning."""
        if retry_state.index is None and (self.num_sequences > 1 or not self.num_output_tokens):
            return request
        index = retry_state.index or 0
        output_token_ids = list(self.processor.output_token_ids(index))
        if retry_state.source is not None:
            output_token_ids.pop()  # the source sends it with the blocks of those before
        return msgspec.structs.replace(request, index=index, n=1, output_token_ids=output_token_ids)

    def relay(self, outputs: Outputs) -> bool:
        """Give the client what is new; see `Attempt`."""
        processor = self.processor
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
            self._begin(outputs.cached_tokens)
        if self._holds is not None:
            self._holds.produced(num_tokens)
        self.usage.completion_tokens += num_tokens
        self._record.relayed(delta.index, num_tokens, outputs.cached_tokens)
        if has_finished := has_ended and processor.finished:
            self.timeline.mark(moments.FINISHED)
            self._record.finish_reason = str(delta.finish_reason)
        if self.num_sequences == self.num_choices:
            self._push(delta)
        elif has_finished:
            for output in best(processor.request_output().outputs, self._request.sampling_params):
                self._push(output)
        return has_ended

    def _begin(self, cached_tokens: CachedTokens) -> None:
        """Note the first token."""
        self.timeline.mark(moments.FIRST_TOKEN)
        self._was_cached = cached_tokens.total > 0
        if not self._request.cache.is_shared:
            self.usage.cached_tokens = min(cached_tokens.total, self.usage.prompt_tokens)
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

    def _wanted(self, request: GenerationRequest) -> dict[str, Any]:
        num_resumed = len(request.output_token_ids)
        return {
            "num_tokens": len(request.prompt_token_ids) + num_resumed,
            "num_encoder_tokens": self._services.num_encoder_tokens,
            "max_tokens": request.sampling_params.output_limit - num_resumed,
            "hashes": lambda layout: self.hashed(request, layout).placement_hashes,
            "data_parallel_rank": self._request.data_parallel_rank,
        }

    async def raise_when_no_worker(self, *, one_token: bool) -> None:
        """Runs while the request waits for a place. Never returns; raises WorkerLost when no worker could serve it for 5 s."""
        await self._services.fleet.wait_until_absent(
            lambda: self._services.selector.has_workers(one_token=one_token), self.patience_s
        )
        raise self.no_worker()

    def no_worker(self) -> WorkerLost:
        roles = "; ".join(self._services.fleet.describe(role) for role in WorkerRole)
        also = ", and local_prefill is never" if self._services.settings.local_prefill == "never" else ""
        also += f", for adapter {self._request.lora_name!r}" if self._request.lora_name else ""
        return WorkerLost(f"no worker could serve this within {self.patience_s:g} s: {roles}{also}").for_clients()
