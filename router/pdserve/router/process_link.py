"""`ProcessLink`: calls between a router's parent process and one of its router processes, over a socket pair.

A frame (`common/ipc/frames.py`) is a msgpack array: kind, number of the call, name, body. Frames arrive in the order in which
they were sent, so a message that ends something arrives after the call that began it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from pdserve.common.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    Overloaded,
    PdServeError,
    PeerError,
    from_code,
)
from pdserve.common.ipc.frame_socket import FrameSocket

log = logging.getLogger(__name__)

CALL_S = 5.0
"""Seconds within which the other process answers a call that waits for nothing."""
_CALL, _RESULT, _ERROR, _MESSAGE = range(4)
T = TypeVar("T")


class _Frame(msgspec.Struct, array_like=True):
    kind: int
    number: int
    """Counts up the calls of the sending process; of a result or error, the number of its call."""
    name: str
    body: msgspec.Raw


class _Failure(msgspec.Struct, array_like=True):
    """A `PdServeError`."""

    code: str
    message: str
    field: str | None
    retry_after_s: float
    is_for_clients: bool


class Handler(msgspec.Struct, frozen=True):
    """Serves the calls, or takes the messages, of one name."""

    kind: Any
    """Type of the argument."""
    serve: Callable[[Any], Any]
    """Argument -> result, or an awaitable of it. Raises: PdServeError, which the caller gets."""


class ProcessLink:
    """One end, used in one event loop. `close` it."""

    def __init__(self, connected: socket.socket, handlers: Mapping[str, Handler]) -> None:
        """Take over one end of a socket pair."""
        self.handlers: dict[str, Handler] = dict(handlers)
        self.on_lost: Callable[[], None] = lambda: None
        """Called once when the link has ended: by `close`, by the other process, or because that wrote what cannot be read."""
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        """Number -> (type of the result, its future)."""
        self._serving: set[asyncio.Task[None]] = set()
        self.is_lost = False
        self._socket = FrameSocket(connected, self._take, self._lost)

    async def call(self, name: str, argument: object, kind: type[T], timeout_s: float = CALL_S) -> T:
        """The result of the other process.

        Raises: what its handler raised; DeadlineExceeded after `timeout_s`; Draining if it has ended.
        """
        if self.is_lost:
            raise _gone()
        number = next(self._numbers)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[number] = kind, future
        try:
            self._write(_CALL, number, name, argument)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"another process of this router gave no answer within {timeout_s:g} s") from None
        finally:
            self._calls.pop(number, None)

    def send(self, name: str, argument: object) -> None:
        """Send a message without an answer; without effect after the end."""
        if not self.is_lost:
            self._write(_MESSAGE, 0, name, argument)

    def close(self) -> None:
        """End the link. May be called again."""
        self._socket.close()
        self._lost()

    def _lost(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(_gone())
        for task in self._serving:
            task.cancel()
        self.on_lost()

    def _take(self, payload: bytes) -> None:
        """Raises: msgspec.MsgspecError, PeerError."""
        frame = msgspec.msgpack.decode(payload, type=_Frame)
        if frame.kind in (_RESULT, _ERROR):
            kind, future = self._calls.get(frame.number, (None, None))
            if future is None or future.done():
                # the caller has left
                return
            if frame.kind == _RESULT:
                future.set_result(msgspec.msgpack.decode(frame.body, type=kind))
            else:
                future.set_exception(_error(msgspec.msgpack.decode(frame.body, type=_Failure)))
            return
        handler = self.handlers.get(frame.name)
        if handler is None:
            raise PeerError(f"there is no call {frame.name[:64]!r}")
        argument = msgspec.msgpack.decode(frame.body, type=handler.kind)
        if frame.kind == _MESSAGE:
            handler.serve(argument)
            return
        try:
            result = handler.serve(argument)
        except Exception as error:
            self._answer_error(frame.number, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._serve(frame.number, result))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        else:
            self._write(_RESULT, frame.number, "", result)

    async def _serve(self, number: int, result: Awaitable[object]) -> None:
        try:
            self._write(_RESULT, number, "", await result)
        except Exception as error:
            self._answer_error(number, error)

    def _answer_error(self, number: int, error: Exception) -> None:
        if not isinstance(error, PdServeError):
            log.error("a call between processes of this router failed", exc_info=error)
            error = InternalError("internal error; the router's log has the details")
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        failure = _Failure(error.code, error.message, error.field, retry_after_s, error.is_for_clients)
        self._write(_ERROR, number, "", failure)

    def _write(self, kind: int, number: int, name: str, body: object) -> None:
        if not self.is_lost:
            frame = _Frame(kind, number, name, msgspec.Raw(msgspec.msgpack.encode(body)))
            self._socket.send(msgspec.msgpack.encode(frame))


def _gone() -> Draining:
    return Draining("another process of this router has ended")


def _error(failure: _Failure) -> PdServeError:
    error = from_code(failure.code, failure.message, failure.field, failure.retry_after_s)
    return error.for_clients() if failure.is_for_clients else error
