"""`FinishRequest`: the one way in which a sequence leaves the engine: its end is reported once, and every part drops it."""

from __future__ import annotations

from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.output_collector import OutputCollector
from pdserve.engine.scheduler.remote_kv_queue import RemoteKvQueue
from pdserve.engine.scheduler.running_batch import RunningBatch
from pdserve.engine.scheduler.sequence_group import SequenceGroup
from pdserve.engine.scheduler.waiting_queues import WaitingQueues
from pdserve.engine.structured_outputs.structured_output_manager import StructuredOutputManager


class FinishRequest:
    """Ends sequences for any cause: last token, abort, error, or decoding elsewhere."""

    def __init__(
        self,
        requests: dict[str, Request],
        kv: KVCacheManager,
        running: RunningBatch,
        admission: WaitingQueues,
        grammars: StructuredOutputManager,
        receives: RemoteKvQueue,
        group: SequenceGroup,
        outputs: OutputCollector,
    ) -> None:
        """requests: the scheduler's living sequences, which those that end are taken from."""
        self._requests = requests
        self._kv = kv
        self._running = running
        self._admission = admission
        self._grammars = grammars
        self._receives = receives
        self._group = group
        self._outputs = outputs

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
        """End a sequence in any state, or all that would have continued its prompt, and report that."""
        self._outputs.tokens(request, new_token_ids or [], status, new_logprobs, cause, pooling_output=pooling_output)
        if request.num_sequences > 1:
            if request.grammar is not None:
                request.grammar.close()
            request.grammar = None  # no sequence continues its state
            for sequence in request.fork():
                self._outputs.tokens(sequence, [], status, cause=cause)
        if Wait.REMOTE_KV in request.waits_for:
            self._receives.stop(request, cause)
        self.forget(request, status)

    def forget(self, request: Request, status: RequestStatus) -> None:
        """Remove a sequence whose end has been reported from every part."""
        self._admission.remove(request)
        self._grammars.forget(request)
        if request.grammar is not None:
            request.grammar.close()
        self._running.leave(request)
        self._kv.free(request)
        del self._requests[request.request_id]
        if request.core.n > 1:
            self._group.remove(request)
        request.move_to(status)
