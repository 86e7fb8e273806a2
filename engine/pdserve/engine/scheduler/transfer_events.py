"""`TransferEvents`: applies an event from the transfer side to the state of the engine.

Late, repeated and unknown events are counted and dropped (I9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.common.errors import PdServeError
from pdserve.engine.kv_cache.block_pool import PinTracker
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.kv_messages import (
    HoldReturned,
    IntoEngine,
    Landed,
    ReceiveFailed,
    Revoke,
    SourceFinished,
    Want,
)
from pdserve.engine.scheduler.kv_send_tracker import KvSendTracker
from pdserve.engine.scheduler.remote_kv_queue import Ready, RemoteKvQueue
from pdserve.engine.scheduler.waiting_queues import WaitingQueues


@dataclass(frozen=True, slots=True)
class End:
    """The event ends this request."""

    request: Request
    status: RequestStatus
    cause: PdServeError | None = None


class TransferEvents:
    """Passes events on to `RemoteKvQueue` and `KvSendTracker`."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        holds: PinTracker,
        receives: RemoteKvQueue,
        sources: KvSendTracker,
        admission: WaitingQueues,
    ) -> None:
        self._requests = requests
        self._holds = holds
        self._receives = receives
        self._sources = sources
        self._admission = admission
        self.num_dropped = 0

    def apply(self, event: IntoEngine) -> Ready | End | None:
        """One event; what the scheduler has to do about it, if anything."""
        if isinstance(event, HoldReturned):
            self._holds.back(event.hold)
            return self._receives.returned(event.request_id, event.hold.block_ids)
        if isinstance(event, Revoke):
            self._sources.forget(event.request_id)
        request = self._requests.get(event.request_id)
        if request is None:
            if not (isinstance(event, Want) and self._sources.want_ended(event.request_id, event.first_index)):
                self.num_dropped += 1
            return None
        if isinstance(event, Landed | SourceFinished) and not self._receives.expects(event):
            self.num_dropped += 1
            return None
        match event:
            case Landed():
                return self._receives.landed(event.request_id, event.num_blocks)
            case SourceFinished():
                outcome = self._receives.source_finished(event)
                return self._failed(request, outcome.cause) if isinstance(outcome, ReceiveFailed) else outcome
            case ReceiveFailed():
                return self._failed(request, event.cause)
            case Want():
                self._want(request, event.first_index)
                return None
            case Revoke():
                return End(request, RequestStatus.FINISHED_ABORTED)

    def _want(self, request: Request, first_index: int) -> None:
        if not request.core.transfer_source or request.wanted_from is not None:
            self.num_dropped += 1
            return
        self._sources.want(request, first_index)
        self._admission.wanted(request)

    def _failed(self, request: Request, cause: PdServeError) -> End | None:
        if Wait.REMOTE_KV in request.waits_for:
            return End(request, RequestStatus.FINISHED_ERROR, cause)
        self.num_dropped += 1
        return None
