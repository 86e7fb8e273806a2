"""`StepResults`: applies a step's result: KV computed, blocks published, tokens appended; `FinishRequest`: ends of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.common import clock
from pdserve.common.errors import InternalError, InvalidRequest, PdServeError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.draft_scheduling import DraftScheduling
from pdserve.engine.scheduler.output_collector import OutputCollector
from pdserve.engine.scheduler.running_batch import RunningBatch
from pdserve.engine.scheduler.sequence_group import SequenceGroup
from pdserve.engine.scheduler.sessions import Sessions
from pdserve.engine.scheduler.tier_loads import TierLoads
from pdserve.engine.scheduler.transfer_events import KvSendTracker
from pdserve.engine.scheduler.waiting.remote_kv_queue import RemoteKvQueue
from pdserve.engine.scheduler.waiting.waiting_queues import WaitingQueues
from pdserve.engine.scheduler_output import NO_TOKEN, ModelRunnerOutput, RequestFailure, SchedulerOutput
from pdserve.engine.structured_outputs.structured_output_manager import StructuredOutputManager


@dataclass(eq=False)
class FinishRequest:
    """Ends sequences for any reason: last token, abort, error, or decoding at another worker."""

    _requests: dict[str, Request]
    """The scheduler's unfinished sequences; ended ones are removed."""
    _kv: KVCacheManager
    _running: RunningBatch
    _waiting: WaitingQueues
    _grammars: StructuredOutputManager
    _receives: RemoteKvQueue
    _loads: TierLoads
    _group: SequenceGroup
    _outputs: OutputCollector

    def finish(
        self,
        request: Request,
        status: RequestStatus,
        *,
        new_token_ids: list[int] | None = None,
        new_logprobs: LogprobsLists | None = None,
        cause: PdServeError | None = None,
        pooling_output: list[float] | None = None,
    ) -> None:
        """End a sequence in any state, or all sequences of an unfinished prompt, and report it."""
        self._outputs.tokens(request, new_token_ids or [], status, new_logprobs, cause, pooling_output=pooling_output)
        if request.num_sequences > 1:
            if request.grammar is not None:
                request.grammar.close()
            request.grammar = None  # no sequence continues from this state
            for sequence in request.fork():
                self._outputs.tokens(sequence, [], status, cause=cause)
        if Wait.REMOTE_KV in request.waits_for:
            self._receives.stop(request, cause)
        self.forget(request, status)

    def fail(self, request: Request, cause: PdServeError) -> None:
        """End a sequence with an error, as `finish` does."""
        self.finish(request, RequestStatus.FINISHED_ERROR, cause=cause)

    def forget(self, request: Request, status: RequestStatus) -> None:
        """Remove a sequence from every part, after its end was reported."""
        self._waiting.remove(request)
        if Wait.OFFER in request.waits_for or request.num_offered_blocks:
            self._receives.cancel_remote(request)
        self._grammars.forget(request)
        if request.grammar is not None:
            request.grammar.close()
        self._running.leave(request)
        self._loads.lookups.stop(request)
        self._loads.stop(request)
        self._kv.free(request)
        del self._requests[request.request_id]
        if request.core.n > 1:
            self._group.remove(request)
        request.move_to(status)


@dataclass(eq=False)
class StepResults:
    """Updates sequences, KV cache and outputs after a step was computed."""

    _requests: Mapping[str, Request]
    _kv: KVCacheManager
    _running: RunningBatch
    _sources: KvSendTracker
    _group: SequenceGroup
    _sessions: Sessions
    _outputs: OutputCollector
    _finisher: FinishRequest
    _drafts: DraftScheduling
    num_computed_prompt_tokens: int = field(default=0, init=False)

    def update(self, scheduled: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        """Apply one step's result."""
        self._fail_without_lora(scheduled, computed)
        self._book_computed(scheduled, computed)
        self._drafts.count(self._requests, scheduled, computed)
        place = 0
        while place < len(computed.req_ids):
            request = self._requests[computed.req_ids[place]]
            if self._append_plain(request, place, computed):
                place += 1
                continue
            places = range(place, place + request.num_sequences)
            place = places.stop
            failure = next((computed.failed[place] for place in places if place in computed.failed), None)
            failure = computed.failed_requests.get(request.request_id, failure)
            if failure is not None:
                self._finisher.fail(request, _cause(request, failure))
                continue
            token_ids = [token_id for place in places for token_id in computed.sampled_token_ids[place]]
            if len(token_ids) > len(places):
                self._append_run(request, token_ids, computed.logprobs.get(places.start))
                continue
            self._append(request, token_ids, [computed.logprobs.get(place) for place in places])
        for request_id, failure in computed.failed_requests.items():
            if (unfinished := self._requests.get(request_id)) is not None:
                self._finisher.fail(unfinished, _cause(unfinished, failure))
        for request_id, values in computed.pooler_output.items():
            self._finisher.finish(self._requests[request_id], RequestStatus.FINISHED_STOPPED, pooling_output=values)
        self._drafts.update(self._requests, scheduled, computed.draft_token_ids)

    def _fail_without_lora(self, scheduled: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        """Mark sequences whose adapter could not be loaded as failed."""
        if not computed.failed_loras:
            return
        for request_id in scheduled.num_scheduled_tokens:
            failure = computed.failed_loras.get(self._requests[request_id].core.lora_fingerprint)
            if failure is not None:
                computed.failed_requests[request_id] = failure
        for fingerprint in computed.failed_loras:
            self._running.lora_slots.forget(fingerprint)

    def _book_computed(self, scheduled: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        """Count the step's tokens as computed; cache and publish their blocks."""
        computed_at = clock.monotonic()
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            if request_id in computed.failed_requests:
                continue  # its blocks hold no keys and values that another sequence may use
            request = self._requests[request_id]
            num_tokens -= scheduled.num_drafts(request_id)  # those that were confirmed count as they are appended
            if request_id in computed.held_back:
                num_tokens -= 1
                if num_tokens == 0:
                    continue
            if request.num_computed_tokens < request.num_given_tokens:
                self.num_computed_prompt_tokens += num_tokens
                request.prefill_chunks.append((computed_at, num_tokens))
                if (of_chunk := computed.prompt_logprobs.get(request_id)) is not None:
                    request.add_prompt_logprobs(of_chunk)
            request.num_computed_tokens += num_tokens
            self._running.encoder.computed(request)
            self._kv.remember_computed(request)
            if request.is_pinned_source:
                self._sources.publish(request)

    def _append_plain(self, request: Request, place: int, computed: ModelRunnerOutput) -> bool:
        """Append one token to a sequence that goes on, as in most steps; False, with nothing changed, where there is more to do."""
        token_ids = computed.sampled_token_ids[place]
        if (
            len(token_ids) != 1
            or request.grammar is not None
            or request.migrations
            or not request.has_emitted
            or "first_token" not in request.moments
            or token_ids[0] == NO_TOKEN
            or computed.failed
            or computed.failed_requests
        ):
            return False
        ended_with = request.append_output(token_ids[0], self._group.max_model_len)
        if ended_with is None:
            self._outputs.next_tokens(request, token_ids, computed.logprobs.get(place))
        else:
            self._report(request, request, token_ids, ended_with, computed.logprobs.get(place))
        return True

    def _append_run(self, request: Request, token_ids: list[int], logprobs: LogprobsLists | None) -> None:
        """Append the tokens of a sequence with drafts, up to the first that ends it."""
        kept, ended_with = self._group.append_run(request, token_ids)
        if ended_with is RequestStatus.FINISHED_ERROR:
            self._finisher.fail(request, _unfit_token(request))
            return
        request.num_computed_tokens += len(kept) - 1
        self._kv.remember_computed(request)
        if len(kept) < len(token_ids):
            self._kv.drop_state(request)  # a session goes on after its end
        self._report(request, request, kept, ended_with, None if logprobs is None else logprobs.part(0, len(kept)))

    def _append(self, request: Request, token_ids: list[int], logprobs: list[LogprobsLists | None]) -> None:
        """Append a sequence's new token, or at the end of a prompt the first token of each of its sequences."""
        if NO_TOKEN in token_ids:
            self._finisher.fail(request, _no_token_left(request))
            return
        request.mark("first_token")
        sequences = self._group.fork(request, token_ids)
        if sequences is None:
            self._finisher.fail(request, _unfit_token(request))
            return
        for (sequence, ended_with), token_id, of_token in zip(sequences, token_ids, logprobs, strict=True):
            self._report(request, sequence, [token_id], ended_with, of_token)
        if request.core.transfer_source:
            # another worker decodes the rest, so the sequences end in this engine
            statuses = [ended_with for _, ended_with in sequences]
            if None in statuses and request.is_unwanted_source:
                self._sources.rest(request)
            self._finisher.forget(request, statuses[0] or RequestStatus.FINISHED_STOPPED)

    def _report(
        self,
        request: Request,
        sequence: Request,
        token_ids: list[int],
        ended_with: RequestStatus | None,
        logprobs: LogprobsLists | None,
    ) -> None:
        """Report new tokens of one of a request's sequences, and end it with them if `ended_with` is given, or if it migrates."""
        if ended_with is None and sequence is request and request.migrates:
            migration = self._sources.migrate(request)
            self._outputs.tokens(request, token_ids, None, logprobs, migration=migration)
            self._finisher.forget(request, RequestStatus.FINISHED_STOPPED)
        elif ended_with is None or request.core.transfer_source:
            self._outputs.tokens(sequence, token_ids, ended_with, logprobs)
        elif self._sessions.ends_with_turn(request):
            self._finisher.finish(sequence, ended_with, new_token_ids=token_ids, new_logprobs=logprobs)
        elif (refusal := self._sessions.end_turn(sequence, ended_with, token_ids, logprobs)) is not None:
            self._finisher.fail(sequence, refusal)


def _unfit_token(request: Request) -> PdServeError:
    failure = None if request.grammar is None else request.grammar.failure
    return failure or InternalError("a token was sampled that does not fit the request's grammar")


def _no_token_left(request: Request) -> InvalidRequest:
    params = request.sampling_params
    rules = {
        "structured_outputs": params.structured_outputs,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words_token_ids,
        "min_tokens": params.min_tokens,
        "logits_processors": params.logits_processors,
    }
    asked = [name for name, given in rules.items() if given]
    return InvalidRequest(
        f"{', '.join(asked)} leave no token for output position {request.num_output_tokens}", asked[0]
    )


def _cause(request: Request, failure: RequestFailure) -> PdServeError:
    """The error that ends a request whose result cannot be used: with embeddings of a client, their numbers are the cause."""
    error = failure.error()
    if isinstance(error, InternalError) and request.core.prompt_embeds is not None:
        return InvalidRequest(
            f"prompt_embeds has numbers that the model cannot compute with: {error.message}", "prompt_embeds"
        )
    return error
