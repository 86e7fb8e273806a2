"""`SessionCommands`: the commands of a session's reader: the next turn, the end of a turn, the end of the session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.request.engine_types import StreamingUpdate
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.sessions import Sessions
from pdserve.engine.scheduler.step_results import FinishRequest
from pdserve.engine.scheduler.transfer_events import TransferEvents


@dataclass(eq=False)
class SessionCommands:
    """Applies them between two steps."""

    _requests: Mapping[str, Request]
    """The scheduler's unfinished sequences."""
    _sessions: Sessions
    _finisher: FinishRequest
    _events: TransferEvents

    def resume_request(self, update: StreamingUpdate, refusal: InvalidRequest | None = None) -> None:
        """A session's next turn: it begins now, or when the turns before it have ended. Updates of no session are counted and
        dropped; input that is too long ends the session.

        refusal: error that ends the session at once.
        """
        request = self._requests.get(update.request_id)
        if request is None or not request.core.resumable:
            self._events.num_dropped += 1
            return
        if refusal is None and request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            request.streaming_queue.append(update)
            return
        refusal = refusal or self._sessions.resume(request, update)
        if refusal is not None:
            self._finisher.fail(request, refusal)

    def finish_session(self, request_id: str) -> None:
        """End a session, after the turns that have arrived. No effect if it has ended."""
        request = self._requests.get(request_id)
        if request is None or not request.core.resumable:
            return
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            self._finisher.finish(request, RequestStatus.FINISHED_STOPPED)
        else:
            request.streaming_queue.append(None)

    def end_text(self, request: Request) -> None:
        """End a sequence after a token that was reported before, or a session's turn; no effect between two turns."""
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            return
        if self._sessions.ends_with_turn(request):
            self._finisher.finish(request, RequestStatus.FINISHED_STOPPED)
        elif (refusal := self._sessions.end_turn(request, RequestStatus.FINISHED_STOPPED, [])) is not None:
            self._finisher.fail(request, refusal)

    def abort(self, request: Request) -> None:
        """End a sequence in any state. A session between two turns has nothing to abort: it is stopped."""
        is_idle = request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        self._finisher.finish(request, RequestStatus.FINISHED_STOPPED if is_idle else RequestStatus.FINISHED_ABORTED)

    def fail_idle(self, cause: PdServeError) -> None:
        """End sessions that are between two turns with an error."""
        for request in list(self._requests.values()):
            if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                self._finisher.fail(request, cause)
