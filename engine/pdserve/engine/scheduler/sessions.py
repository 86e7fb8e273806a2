"""`Sessions`: ends and begins turns of a session.

    RUNNING --end_turn--> WAITING_FOR_STREAMING_REQ --resume--> WAITING_FOR_FSM or WAITING --> RUNNING

Between turns a session costs a step nothing, and keeps its blocks until other sequences need blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.request.engine_types import LogprobsLists, StreamingUpdate
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.output_collector import OutputCollector
from pdserve.engine.scheduler.running_batch import RunningBatch
from pdserve.engine.scheduler.tier_loads import TierLoads
from pdserve.engine.scheduler.waiting.waiting_queues import WaitingQueues
from pdserve.engine.structured_outputs.structured_output_manager import StructuredOutputManager


@dataclass(eq=False)
class Sessions:
    """Transitions of streaming sessions in the scheduler. Has no state of its own."""

    _config: EngineConfig
    _kv: KVCacheManager
    _running: RunningBatch
    _waiting: WaitingQueues
    _loads: TierLoads
    _grammars: StructuredOutputManager
    _outputs: OutputCollector

    def ends_with_turn(self, request: Request) -> bool:
        """True if the end of the running turn is the end of the request: no session, or one that its client has ended."""
        queue = request.streaming_queue
        return not request.core.resumable or (bool(queue) and queue[0] is None)

    def end_turn(
        self,
        request: Request,
        ended_with: RequestStatus,
        new_token_ids: list[int],
        logprobs: LogprobsLists | None = None,
    ) -> InvalidRequest | None:
        """End a turn; the session continues, with the next turn if that has arrived.

        new_token_ids: its last token; empty if it ends after one that was reported before. Returns: as `resume`.
        """
        self._outputs.tokens(request, new_token_ids, ended_with, logprobs, awaits_input=True)
        self._waiting.remove(request)
        self._running.leave(request)
        if request.grammar is not None:
            request.grammar.close()
            request.grammar = None
        self._loads.lookups.stop(request)
        if self._loads.stop(request):
            self._kv.free(request)
            request.num_computed_tokens = 0
            request.move_to(RequestStatus.WAITING)
        if request.status is not RequestStatus.RUNNING:
            # it was preempted: between two turns it has no blocks, as one whose blocks were taken, or those that were loaded
            request.move_to(RequestStatus.RUNNING)
        self._kv.idle(request)
        request.move_to(RequestStatus.WAITING_FOR_STREAMING_REQ)
        self._waiting.idle_sessions.add(request.request_id)
        update = request.streaming_queue.popleft() if request.streaming_queue else None
        return None if update is None else self.resume(request, update)

    def resume(self, request: Request, update: StreamingUpdate) -> InvalidRequest | None:
        """Begin the next turn. Returns an error, with nothing changed, if the input is refused."""
        num_kept = request.num_output_tokens if update.num_kept_output_tokens is None else update.num_kept_output_tokens
        if not 0 <= num_kept <= request.num_output_tokens:
            return InvalidRequest(
                f"num_kept_output_tokens is {num_kept}, the turn before has {request.num_output_tokens} output tokens",
                "num_kept_output_tokens",
            )
        num_before = request.num_prompt_tokens + num_kept
        num_tokens = num_before + len(update.prompt_token_ids)
        limit = self._config.max_model_len - 1
        if num_tokens > limit:
            text = f"the session has {num_tokens} tokens with this input, at most {limit} leave room for one more"
            return PromptTooLong(text, "prompt_token_ids")
        if num_before < request.num_tokens:
            self._kv.truncate(request, num_before)
            del request.token_ids[num_before:]
        self._waiting.idle_sessions.discard(request.request_id)
        request.resume(update)
        if Wait.GRAMMAR in request.waits_for:
            self._grammars.start(request)
        else:
            self._waiting.add(request)
        return None
