"""`ProcessLink`: calls between a router's parent process and one of its router processes, over a socket pair.

A frame is a length (4 bytes, little-endian) and a msgpack array: kind, number of the call, name, body. Frames arrive in the order
in which they were sent, so a message that ends something arrives after the call that began it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

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

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""A longer frame ends the link."""
CALL_S = 5.0
"""Seconds within which the other process answers a call that waits for nothing."""
_LENGTH = struct.Struct("<I")
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


class ProcessLink(asyncio.Protocol):
    """One end, used in one event loop. `close` it."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.on_lost: Callable[[], None] = lambda: None
        """Called once when the other process has ended, or wrote what cannot be read."""
        self._transport: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        """Number -> (type of the result, its future)."""
        self._serving: set[asyncio.Task[None]] = set()
        self.is_lost = False

    @classmethod
    async def open(cls, connected: socket.socket, handlers: Mapping[str, Handler]) -> ProcessLink:
        """Take over one end of a socket pair."""
        link = cls()
        link.handlers |= handlers
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connected)
        return link

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
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(_gone())
        for task in self._serving:
            task.cancel()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._received += data
        start, size = 0, len(self._received)
        try:
            while size - start >= _LENGTH.size:
                [length] = _LENGTH.unpack_from(self._received, start)
                if length > MAX_FRAME_BYTES:
                    raise PeerError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are read")
                end = start + _LENGTH.size + length
                if end > size:
                    break
                payload = bytes(self._received[start + _LENGTH.size : end])
                start = end
                self._take(msgspec.msgpack.decode(payload, type=_Frame))
        except (PeerError, msgspec.MsgspecError) as error:
            log.error("a message between processes of this router cannot be read: %s", error)
            start = size
            self.close()
        finally:
            del self._received[:start]

    def _take(self, frame: _Frame) -> None:
        """Raises: msgspec.MsgspecError, PeerError."""
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
        if self.is_lost or self._transport is None:
            return
        frame = _Frame(kind, number, name, msgspec.Raw(msgspec.msgpack.encode(body)))
        payload = msgspec.msgpack.encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            raise InternalError(
                f"a message of {len(payload)} bytes between processes, at most {MAX_FRAME_BYTES} are read"
            )
        self._transport.write(_LENGTH.pack(len(payload)) + payload)


def _gone() -> Draining:
    return Draining("another process of this router has ended")


def _error(failure: _Failure) -> PdServeError:
    error = from_code(failure.code, failure.message, failure.field, failure.retry_after_s)
    return error.for_clients() if failure.is_for_clients else error
