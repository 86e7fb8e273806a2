"""`GuardedConnection`: one HTTP connection, closed when its client does not keep up."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pdserve.common import clock
from pdserve.common.net.chunk_writer import ChunkWriter
from pdserve.common.net.connection_gate import ConnectionPlace

HEADER_TIMEOUT_S = 10.0
"""Within which a header must be complete, from the connection's or the request's first byte on."""
BODY_WINDOW_S = 10.0
MIN_BODY_BYTES_PER_S = 1024
"""Least bytes of a body per second, over each `BODY_WINDOW_S`."""
LINGER_S = 5.0
"""Seconds for which the rest of a body is read and dropped after the response."""
WRITE_STALL_S = 60.0
"""Seconds for which a client may read nothing of its response."""


_AMBIGUOUS = {b"content-length", b"transfer-encoding"}
"""Together they may hide a request from a proxy that reads only one of them (RFC 9112, section 6.1)."""
_REFUSAL = b"Invalid HTTP request received: it has both Content-Length and Transfer-Encoding, and one is allowed."
LOG_EVERY_S = 60.0


class ClientFaults(logging.Filter):
    """Lets one line per `LOG_EVERY_S` pass of each warning that any client can cause, with the number of those left out."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, tuple[float, int]] = {}
        """Warnings by text, each uvicorn's own: when it passed, and how many were left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or record.args:
            return True
        text, now = str(record.msg), clock.monotonic()
        passed_at, num_left_out = self._passed.get(text, (-LOG_EVERY_S, 0))
        if now - passed_at < LOG_EVERY_S:
            self._passed[text] = passed_at, num_left_out + 1
            return False
        self._passed[text] = now, 0
        if num_left_out:
            record.msg = f"{text} ({num_left_out} more since the last such warning)"
        return True

    def forget(self) -> None:
        """Let the next line of each warning pass."""
        self._passed.clear()


CLIENT_FAULTS = ClientFaults()


def _is_no_cut(record: logging.LogRecord) -> bool:
    """False for a request that a stop has cut off: uvicorn logs an exception for each, after a line that counts them."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


for kept in (CLIENT_FAULTS, _is_no_cut):
    logging.getLogger("uvicorn.error").addFilter(kept)


class GuardedConnection(H11Protocol):
    """uvicorn's, with limits that it lacks. `look` is called about once a second."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        place: ConnectionPlace,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._own_app, self.app = self.app, self._answer
        self._place = place
        self._num_received = 0
        self._since = 0.0
        """When the client began to owe what it owes: a header, a part of a body, or that it reads."""
        self._owes: object = None
        self._received_then = 0
        self._unsent = 0
        self._unsent_since = 0.0

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        given = {name for name, _ in scope["headers"]}
        if given >= _AMBIGUOUS:
            await _refuse(send)
            return
        ChunkWriter(self).offer(scope)
        await self._own_app(scope, receive, send)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._since = self._unsent_since = self.loop.time()
        self._owes = h11.IDLE
        self._place.is_open = True
        self._place.end = self.transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:
            # the next request begins
            self._since, self._owes = self.loop.time(), h11.IDLE
        self._num_received += len(data)
        super().data_received(data)
        if self._owes is h11.IDLE and self.conn.their_state is not h11.IDLE:
            self._owes = None
            self._place.serves()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._place.waits()

    def look(self, now: float) -> None:
        """Close the connection if its client has owed something for too long. now: the loop's clock."""
        if self._is_stuck(now):
            self.transport.abort()
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            if self.timeout_keep_alive_task is None and now - self._since > HEADER_TIMEOUT_S:
                self.transport.abort()
            return
        answered = self.cycle is not None and self.cycle.response_complete
        owes = None if state is not h11.SEND_BODY or (self.flow.read_paused and not answered) else (state, answered)
        if owes != self._owes:
            self._owes, self._since, self._received_then = owes, now, self._num_received
            return
        if owes is None:
            return
        if answered:
            if now - self._since > LINGER_S:
                self.transport.abort()
        elif now - self._since >= BODY_WINDOW_S:
            if self._num_received - self._received_then < MIN_BODY_BYTES_PER_S * (now - self._since):
                self.transport.abort()
            self._since, self._received_then = now, self._num_received

    def _is_stuck(self, now: float) -> bool:
        """True if none of the waiting output has been sent for too long."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._unsent_since = now
        self._unsent = unsent
        return now - self._unsent_since > WRITE_STALL_S


async def _refuse(send: Any) -> None:
    """Answer a request that two readers may read differently, and end its connection."""
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(_REFUSAL)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL})
