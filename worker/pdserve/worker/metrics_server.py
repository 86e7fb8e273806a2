"""`MetricsServer`: `/metrics` and `/health` of a worker over HTTP, in the asyncio thread. One request a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8192
HEAD_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What `/health` says; `ok` decides between 200 and 503."""

    ok: bool
    status: str
    """`ok`, `draining`, `stuck` or `dead`."""
    engine_tick: int
    engine_tick_age_s: float


class MetricsServer:
    """`start` it, `stop` it."""

    def __init__(self, metrics: Callable[[], bytes], health: Callable[[], Health]) -> None:
        self._metrics = metrics
        self._health = health
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 draws a free one. Raises: ConfigError naming the address."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError, ConnectionError):
            log.debug("a metrics request was cut short")
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.split(b" ")[0].split(b"?")[0]
        if not rest.endswith((b" HTTP/1.1", b" HTTP/1.0")):
            return _response(400, b"not HTTP/1\n", with_body=True)
        if method not in (b"GET", b"HEAD"):
            return _response(405, b"only GET\n", with_body=True)
        with_body = method == b"GET"
        if path == b"/metrics":
            return _response(200, self._metrics(), CONTENT_TYPE, with_body=with_body)
        if path == b"/health":
            health = self._health()
            status = 200 if health.ok else 503
            return _response(status, msgspec.json.encode(health), "application/json", with_body=with_body)
        return _response(404, b"/metrics and /health are here\n", with_body=with_body)


def _response(status: int, body: bytes, content_type: str = "text/plain; charset=utf-8", *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
