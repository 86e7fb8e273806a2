"""`EngineCoreClient`: the door to an engine, for workers as for `LLM`. What passes it is a value (`messages.py`).

    client                              engine's side (`EngineSide`): engine thread, transfers
    ------                              ------------------------------------------------------
    add_request, utility, ...    --->
                                 <---   outputs, events of transfers, ends of released requests; the engine's failure

Two transports: `InprocClient`, a call, and `ProcessClient`, frames to a process of its own.

Life of a request: `add_request`; its outputs, in order, until the last of its last sequence. A request with a transfer, or whose
reader needs to know when the engine holds nothing of it any more, ends with `release_request`, which `Released` answers; the other
way to end it early is `abort_requests`. A request that the engine refuses ends like one that fails: its only output has the error's
code, message and field.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pdserve.common.errors import InvalidRequest, PdServeError, from_code
from pdserve.common.ipc.calls import Calls
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, SchedulerStats, StreamingUpdate
from pdserve.engine.client.messages import (
    AbortRequests,
    CallUtility,
    EndSequence,
    EngineFailed,
    EngineStarted,
    FailIdleSessions,
    FailRequest,
    FailRequests,
    FinishSession,
    ForReader,
    FromEngine,
    MigrateSequence,
    ReleaseRequest,
    ResumeRequest,
    StartEngine,
    ToEngine,
    UtilityOutput,
)
from pdserve.engine.client.output_queue import OutputQueue
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request_verifier import RequestVerifier
from pdserve.engine.scheduler_output import RequestFailure
from pdserve.engine.stats.stat_recorder import StatRecorder


class EngineCoreClient(abc.ABC):
    """An engine with one front end, which reads outputs by `get_output`, by `get_output_async` or by `subscribe`, never by two
    of them."""

    info: EngineInfo
    verifier: RequestVerifier
    """The engine's rules for requests."""
    recorder: StatRecorder | None = None
    """Sees requests and outputs, for stat loggers."""
    transfers: Any = None
    """Properties of the engine's transfer side; None without one."""

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        """State of the engine after its last step."""
        self._outputs = OutputQueue()
        self._pass_on: Callable[[ForReader], None] = self._outputs.put
        self._calls = Calls()
        self._started: Future[None] = Future()
        self._ending = threading.Lock()
        self._ended_with: PdServeError | None = None

    # ---- life

    def subscribe(self, on_message: Callable[[ForReader], None]) -> None:
        """Have `on_message` called with all that follows, in place of `get_output`, where the transport reads: a worker's in its
        event loop. `EngineFailed` is the last."""
        self._pass_on = on_message
        if (cause := self._ended_with) is not None:
            on_message(EngineFailed(RequestFailure.of(cause)))

    def start(self, *, warm_up: bool) -> Future[None]:
        """Start the engine's thread; done when it runs, and has warmed up. Its error is that of the engine's end."""
        self._send(StartEngine(warm_up))
        return self._started

    @abc.abstractmethod
    def close(self) -> None:
        """End the engine after the step it is in, and everything that was started for it; blocks. Harmless when called again."""

    @abc.abstractmethod
    async def shutdown(self) -> None:
        """End transfers, then as `close`, without blocking the event loop. Also without a start."""

    @abc.abstractmethod
    def kill(self) -> None:
        """The engine is stuck: write the stacks of its process, and end that if it is another one than this. Any thread."""

    @property
    @abc.abstractmethod
    def tick(self) -> int:
        """Advances while the engine makes progress."""

    @property
    @abc.abstractmethod
    def ticked_at(self) -> float:
        """When the tick last moved, `clock.monotonic()` seconds."""

    @property
    @abc.abstractmethod
    def transfer_state(self) -> Any:
        """State of the transfer side; None without one."""

    # ---- requests

    def add_request(self, request: EngineCoreRequest, transfer: object = None, *, is_verified: bool = False) -> None:
        """Queue a request. Its id is one that no open request has. transfer: where its blocks go, or come from; None: nowhere.

        is_verified: `verifier` has passed it; else one that it does not pass is refused. Raises: WorkerLost or Cancelled after the
        engine's end.
        """
        self._require_running()
        if self.recorder is not None:
            self.recorder.add_request(request)
        if not is_verified:
            try:
                self.verifier.verify(request)
            except InvalidRequest as error:
                self._pass_on(refused_outputs(request.request_id, error))
                return
        self._add_request(request, transfer)

    def resume_request(self, update: StreamingUpdate, *, is_verified: bool = False) -> None:
        """Queue a session's next turn. A refused one ends the session. Raises: as `add_request`."""
        self._require_running()
        if self.recorder is not None:
            self.recorder.resume_request(update)
        if not is_verified:
            try:
                self.verifier.verify_update(update)
            except InvalidRequest as error:
                self._send(FailRequest(update.request_id, RequestFailure.of(error)))
                return
        self._send(ResumeRequest(update))

    def finish_session(self, request_id: str) -> None:
        """End a session after the turns that were queued. Harmless when it had ended, and after the engine's end."""
        self._send(FinishSession(request_id))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests: their sequences end with finish reason `ABORT`. Harmless for unknown ones and after the engine's end."""
        self._send(AbortRequests(list(request_ids)))

    def end_sequence(self, request_id: str, index: int, turn: int | None = None) -> None:
        """One sequence, or this turn of a session, has ended where its text is made. Harmless when it had ended, and after the
        engine's end."""
        self._send(EndSequence(request_id, index, turn))

    def migrate_sequence(self, request_id: str, index: int, receiver: object, *, without_draft_head: bool) -> None:
        """End a sequence after its next token, in an output with `migration`, and send its blocks to the receiver. Without effect
        on one that has ended, on sessions, and after the engine's end.

        receiver: a value of the engine's transfer side.
        """
        self._send(MigrateSequence(request_id, index, without_draft_head, receiver))

    def release_request(self, request_id: str) -> None:
        """Abort a request and its transfer, unless they have ended; `Released` follows, unless the engine has ended."""
        self._send(ReleaseRequest(request_id))

    def fail_idle_sessions(self, cause: PdServeError) -> None:
        """End sessions that are between two turns."""
        self._send(FailIdleSessions(RequestFailure.of(cause)))

    def fail_requests(self, cause: PdServeError) -> None:
        """End all requests."""
        self._send(FailRequests(RequestFailure.of(cause)))

    # ---- outputs

    def get_output(self) -> EngineCoreOutputs:
        """The results of the next step that has any. Blocks; call it while a request is open.

        Raises, after the outputs that had arrived: WorkerLost with the text of the error that ended the engine; every open
        request is lost then. Cancelled after `close`.
        """
        return self.recorded(self._outputs.get())

    async def get_output_async(self) -> EngineCoreOutputs:
        """The same without blocking the event loop, which is that of the first call."""
        return self.recorded(await self._outputs.get_async())

    def recorded(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Show outputs that were read to the recorder."""
        if self.recorder is not None:
            self.recorder.record(outputs)
        return outputs

    def _log_stats(self) -> None:
        """The end of the recorder; once."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.log()

    # ---- utilities

    def call_utility(self, name: str, *args: Any) -> Future[Any]:
        """Call a function of `utilities.py`, or of the transfer side. args: msgpack values, and so is the result.

        The answer's errors: InvalidRequest for an unknown name or wrong arguments, InternalError when the function failed; as
        `get_output`. Raises: TypeError for arguments that are no msgpack values, PeerError for too long ones.
        """
        call_id, answer = self._calls.open()
        if not answer.done():
            try:
                self._send(CallUtility(call_id, name, list(args)))
            except BaseException:
                self._calls.forget(call_id)
                raise
        return answer

    def utility(self, name: str, *args: Any) -> Any:
        """`call_utility`'s answer; blocks."""
        return self.call_utility(name, *args).result()

    async def utility_async(self, name: str, *args: Any) -> Any:
        """The same without blocking the event loop."""
        return await asyncio.wrap_future(self.call_utility(name, *args))

    # ---- the transport

    @abc.abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Pass a message to the engine's side. Without effect after the engine's end."""

    @abc.abstractmethod
    def _add_request(self, request: EngineCoreRequest, transfer: object) -> None:
        """Pass a request on."""

    def _on_message(self, message: FromEngine) -> None:
        """Take a message from the engine's side."""
        match message:
            case EngineCoreOutputs():
                if message.scheduler_stats is not None:
                    self.stats = message.scheduler_stats
                self._pass_on(message)
            case UtilityOutput(call_id, result, failure):
                self._calls.answer(call_id, result, None if failure is None else failure.error())
            case EngineStarted():
                if not self._started.done():
                    self._started.set_result(None)
            case EngineFailed(failure):
                self._end(failure.error())
            case _:
                self._pass_on(message)  # type: ignore[arg-type]

    def _end(self, cause: PdServeError) -> None:
        """Report the end to all that wait, once."""
        with self._ending:
            if self._ended_with is not None:
                return
            self._ended_with = cause
        self._calls.end(cause)
        if not self._started.done():
            self._started.set_exception(cause)
        self._pass_on(EngineFailed(RequestFailure.of(cause)))

    def _require_running(self) -> None:
        """Raises: the error that ended the engine."""
        if (cause := self._ended_with) is not None:
            raise from_code(cause.code, cause.message)
