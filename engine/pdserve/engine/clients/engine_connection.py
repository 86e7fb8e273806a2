"""`EngineConnection`: a child process, the socket to it, and the two threads that read and write the socket."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from pdserve.common.errors import Cancelled, PdServeError, PeerError, WorkerLost, from_code
from pdserve.engine.child_process import ChildProcess, StartProcess, exit_text, start_module, wait_for_exit
from pdserve.engine.clients.frames import (
    EngineDead,
    Loaded,
    Outputs,
    Utility,
    UtilityOutput,
    decode_from_engine,
)
from pdserve.engine.clients.output_queue import OutputQueue
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.request_messages import encode
from pdserve.engine.socket_frames import receive_frame, send_frame, verify_length

_MODULE = "pdserve.engine.clients.engine_core_proc"
_END_S = 5.0
"""Seconds for the process to end after its socket is closed."""


def start_program(descriptor: int) -> ChildProcess:
    """Start the engine's program."""
    return start_module(_MODULE, descriptor)


class EngineConnection:
    """Any thread may use it. Messages are written by a thread of its own, so that a full socket blocks no caller and Ctrl-C
    cuts no message."""

    def __init__(self, start: StartProcess) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start(theirs.fileno())
            except BaseException:
                self._socket.close()
                raise
        self.outputs = OutputQueue()
        self.loaded: Future[EngineInfo] = Future()
        """Ends with the error, when the engine could not be loaded."""
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._ended_with: PdServeError | None = None
        self._closing = threading.Lock()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("engine-reader", self._read), ("engine-writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def require_running(self) -> None:
        """Raises: the error that ended the engine."""
        if (cause := self._ended_with) is not None:
            raise from_code(cause.code, cause.message)

    def send(self, payload: bytes) -> None:
        """Queue a message; without effect after the engine's end. Raises: PeerError for one that is too long."""
        verify_length(len(payload))
        self._unsent.put(payload)

    def call(self, name: str, args: Sequence[Any]) -> Future[Any]:
        """Call a utility.

        Raises: the error that ended the engine; TypeError for arguments that are no msgpack values, PeerError for too long ones.
        """
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # no caller can cancel it
        with self._lock:
            self.require_running()
            call_id = next(self._call_ids)
            self.send(encode(Utility(call_id, name, list(args))))
            self._calls[call_id] = answer
        return answer

    def close(self) -> None:
        """End the process, after the step that it is in, and the threads. Harmless when called again, and in a forked process."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            self._end(Cancelled("the engine was shut down"))
            with contextlib.suppress(OSError):  # the peer has closed it, or it is closed
                self._socket.shutdown(socket.SHUT_RDWR)
            for thread in self._threads:
                thread.join()
            self._socket.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _write(self) -> None:
        # after an error, the reader reports the end
        with contextlib.suppress(OSError):
            while (payload := self._unsent.get()) is not None:
                send_frame(self._socket, payload)

    def _read(self) -> None:
        error: PdServeError | None = None
        try:
            while (payload := receive_frame(self._socket)) is not None:
                message = decode_from_engine(payload)
                match message:
                    case Outputs(outputs):
                        self.outputs.put(outputs)
                    case UtilityOutput():
                        self._answer(message)
                    case Loaded(info):
                        self._has_loaded(info)
                    case EngineDead(failure):
                        self._end(failure.error())
        except OSError:
            pass
        except (PeerError, msgspec.DecodeError) as broken:
            error = WorkerLost(f"the engine's process sent a message that cannot be read: {broken}")
        if self._ended_with is None:
            self._end(error or WorkerLost(self._exit_text()))

    def _exit_text(self) -> str:
        """How the process ended, which closed its socket."""
        try:
            status = wait_for_exit(self._process, _END_S)
        except subprocess.TimeoutExpired:
            return "the engine's process closed its socket"
        return f"the engine's process {exit_text(status)}"

    def _has_loaded(self, info: EngineInfo) -> None:
        with self._lock:
            if not self.loaded.done():
                self.loaded.set_result(info)

    def _answer(self, message: UtilityOutput) -> None:
        with self._lock:
            answer = self._calls.pop(message.call_id, None)
        if answer is not None and message.failure is not None:
            answer.set_exception(message.failure.error())
        elif answer is not None:
            answer.set_result(message.result)

    def _end(self, cause: PdServeError) -> None:
        """Report the end to all that wait, once."""
        with self._lock:
            if self._ended_with is not None:
                return
            self._ended_with = cause
            calls, self._calls = self._calls, {}
            if not self.loaded.done():
                self.loaded.set_exception(cause)
        for answer in calls.values():
            answer.set_exception(cause)
        self.outputs.put(cause)
        self._unsent.put(None)
