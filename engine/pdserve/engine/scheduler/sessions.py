"""`Sessions`: ends and begins turns of a session.

    RUNNING --end_turn--> WAITING_FOR_STREAMING_REQ --resume--> WAITING --> RUNNING

Between turns a session costs a step nothing, and keeps its blocks until other sequences need blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.errors import PromptTooLong
from pdserve.common.request.engine_types import LogprobsLists, StreamingUpdate
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.output_collector import OutputCollector
from pdserve.engine.scheduler.running_batch import RunningBatch
from pdserve.engine.scheduler.waiting_queues import WaitingQueues


@dataclass(eq=False)
class Sessions:
    """Transitions of streaming sessions in the scheduler. Has no state of its own."""

    _config: EngineConfig
    _kv: KVCacheManager
    _running: RunningBatch
    _waiting: WaitingQueues
    _outputs: OutputCollector

    def end_turn(
        self, request: Request, ended_with: RequestStatus, token_id: int, logprobs: LogprobsLists | None
    ) -> None:
        """End a turn after its last token; the session continues."""
        self._outputs.tokens(request, [token_id], ended_with, logprobs, awaits_input=True)
        self._running.leave(request)
        self._kv.idle(request)
        request.move_to(RequestStatus.WAITING_FOR_STREAMING_REQ)

    def resume(self, request: Request, update: StreamingUpdate) -> PromptTooLong | None:
        """Begin the next turn. Returns an error, with nothing changed, if the input is refused."""
        num_tokens = request.num_tokens + len(update.prompt_token_ids)
        limit = self._config.max_model_len - 1
        if num_tokens > limit:
            text = f"the session has {num_tokens} tokens with this input, at most {limit} leave room for one more"
            return PromptTooLong(text, "prompt_token_ids")
        request.resume(update)
        self._waiting.add(request)
        return None
