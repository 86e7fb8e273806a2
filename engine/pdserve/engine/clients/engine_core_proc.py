"""`EngineCoreProc`: the process of a `ProcessClient`'s engine.

Usage, by `ProcessClient` alone: python -m pdserve.engine.clients.engine_core_proc DESCRIPTOR

DESCRIPTOR is this process's end of a socket pair; the process ends when the other end is closed, by the client or by the end
of its process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.errors import InternalError, InvalidRequest, PdServeError, PeerError
from pdserve.common.processes.child_life import end_after, leave_signals_to_peer
from pdserve.common.processes.shared_interpreter import share_interpreter
from pdserve.common.request.engine_types import EngineCoreOutputs
from pdserve.engine.clients.frames import (
    AbortRequests,
    AddRequest,
    EndSequence,
    EngineDead,
    FinishSession,
    FromEngine,
    Load,
    Loaded,
    Outputs,
    ResumeRequest,
    ToEngine,
    Utility,
    UtilityOutput,
    decode_to_engine,
)
from pdserve.engine.clients.inproc_client import InprocClient, failure_text
from pdserve.engine.clients.loaded_engine import LoadedEngine
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request_messages import decode_request, encode, output_messages
from pdserve.engine.scheduler_output import RequestFailure
from pdserve.engine.socket_frames import receive_frame, send_frame

log = logging.getLogger(__name__)

LAST_STEP_S = 3.0
"""Seconds that a step, or loading, may go on after the client's end; then the process ends in the middle of it."""


class EngineCoreProc:
    """Reads messages in its main thread and runs the engine in another. It is the `OutputSink` of its engine."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._sending = threading.Lock()
        self._is_closing = False
        self._has_failed = False

    def run(self) -> int:
        """Until the client's end. Returns the exit status: 1 when the engine failed or could not be loaded."""
        end_after(self._client, LAST_STEP_S)
        message = self._receive()
        if not isinstance(message, Load):
            return 0 if message is None else 1
        try:
            engine = LoadedEngine(Path(message.folder), message.settings)
            inner = InprocClient(engine, self)
        except PdServeError as error:
            self._send(EngineDead(RequestFailure.of(error)))
            return 1
        except Exception as error:
            log.exception("the engine could not be loaded")
            self._send(EngineDead(RequestFailure.of(InternalError(failure_text(error)))))
            return 1
        gc.collect()
        gc.freeze()  # what loading made stays; no collection has to look at it
        inner.start()
        self._send(Loaded(engine.info))
        try:
            while (message := self._receive()) is not None:
                self._serve(inner, message)
        finally:
            self._is_closing = True
            inner.close()
        return int(self._has_failed)

    def put(self, item: EngineCoreOutputs | PdServeError) -> None:
        """`OutputSink.put`. Called in the engine's thread, and in the main thread for a refused request."""
        if isinstance(item, EngineCoreOutputs):
            self._send_outputs(item)
        elif not self._is_closing:
            self._has_failed = True
            self._send(EngineDead(RequestFailure.of(item)))
            with contextlib.suppress(OSError):
                self._client.shutdown(socket.SHUT_RD)  # the main thread reads the end, and ends the process

    def _serve(self, inner: InprocClient, message: ToEngine) -> None:
        match message:
            case AddRequest(request_id, request):
                self._add(inner, request_id, request)
            case ResumeRequest(update):
                with contextlib.suppress(PdServeError):  # after the engine's end, which was reported
                    inner.resume_request(update)
            case FinishSession(request_id):
                inner.finish_session(request_id)
            case AbortRequests(request_ids):
                inner.abort_requests(request_ids)
            case EndSequence(request_id, index):
                inner.end_sequence(request_id, index)
            case Utility(call_id, name, args):
                with contextlib.suppress(PdServeError):
                    inner.call(name, args).add_done_callback(lambda answer: self._answer(call_id, answer))
            case Load():
                raise PeerError("a second model was to be loaded")

    def _add(self, inner: InprocClient, request_id: str, encoded: msgspec.Raw) -> None:
        try:
            request = decode_request(encoded)
        except InvalidRequest as refusal:
            self._send_outputs(refused_outputs(request_id, refusal))
            return
        with contextlib.suppress(PdServeError):  # after the engine's end, which was reported
            inner.add_request(request)

    def _answer(self, call_id: int, answer: Future[Any]) -> None:
        error = answer.exception()
        failure = RequestFailure.of(error) if isinstance(error, PdServeError) else None
        self._send(UtilityOutput(call_id, None if failure else answer.result(), failure))

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        for payload in output_messages(outputs, Outputs):
            self._send_payload(payload)

    def _send(self, message: FromEngine) -> None:
        self._send_payload(encode(message))

    def _send_payload(self, payload: bytes) -> None:
        # the client has closed its end: the main thread reads that too
        with self._sending, contextlib.suppress(OSError):
            send_frame(self._client, payload)

    def _receive(self) -> ToEngine | None:
        try:
            payload = receive_frame(self._client)
            return None if payload is None else decode_to_engine(payload)
        except OSError:
            return None
        except msgspec.DecodeError as error:
            raise PeerError(f"a message to the engine's process cannot be read: {error}") from error


def main() -> int:
    leave_signals_to_peer()
    share_interpreter()
    with socket.socket(fileno=int(sys.argv[1])) as client:
        return EngineCoreProc(client).run()


if __name__ == "__main__":
    sys.exit(main())
