"""`ChunkWriter`: writes parts of a streamed response without a coroutine and without h11, where the connection can take them.

For each part ASGI's `send` starts a coroutine, makes an event, and checks a state machine that a part leaves as it is.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_EXTENSION = "pdserve.chunks"


class ChunkWriter:
    """Writer of one response without `content-length`, which h11 sends in chunks; `send` begins and ends it."""

    def __init__(self, connection: H11Protocol) -> None:
        """connection: it serves the request now."""
        self._flow = connection.flow
        self._transport = connection.transport
        self._conn = connection.conn
        self._cycle = connection.cycle
        version = connection.conn.their_http_version
        self._is_chunked = version is not None and version >= b"1.1" and connection.scope["method"] != "HEAD"

    @property
    def is_ready(self) -> bool:
        """True if a part may be written now. Else `send` must be used: the response has not begun, is complete, or is not sent in
        chunks, or the client has to read first or has disconnected."""
        return (
            self._is_chunked
            and not self._flow.write_paused
            and not self._cycle.disconnected
            and not self._cycle.response_complete
            and self._conn.our_state is h11.SEND_BODY
        )

    def write(self, part: bytes) -> None:
        """Send a part, if `is_ready`."""
        # an empty chunk would end the response
        if part:
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def taken(self) -> None:
        """Wait until the system has taken everything that was written, or the client has disconnected."""
        if not self._transport.get_write_buffer_size():
            return
        # the transport pauses the writer above this mark, and resumes it when nothing is left
        self._transport.set_write_buffer_limits(high=1)
        try:
            await self._flow.drain()
        finally:
            self._transport.set_write_buffer_limits()

    def abandon(self) -> None:
        """Drop the connection with what is unread of the response, which is not complete."""
        self._cycle.disconnected = True
        self._transport.abort()

    def offer(self, scope: MutableMapping[str, Any]) -> None:
        """Let the application find this writer with `chunk_writer`."""
        scope["extensions"] = {_EXTENSION: self}


def chunk_writer(scope: MutableMapping[str, Any]) -> ChunkWriter | None:
    """The writer of a request's response; None if the server offers none."""
    writer: ChunkWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return writer
