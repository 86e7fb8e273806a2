"""`ImageTransport`: requests to hosts that are not trusted, one per connection; an answer costs no more than its bytes.

httpx's own transport reads as many interim answers (status 1xx), and as small parts, as a host sends, and the event loop's thread
works for each. httpx's client would keep cookies, and send those of one tenant's fetch with another's; a transport keeps nothing.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import httpcore
import httpx

FREE_PARTS = 256
"""Parts of any size in an answer."""
MIN_PART_BYTES = 512
"""Mean size of further parts, at least: a packet on the Internet carries more."""
MAX_INTERIM_ANSWERS = 8
_INTERIM = re.compile(rb"HTTP/1\.[01] 1\d\d")


class CostlyAnswer(httpx.RemoteProtocolError):
    """The answer takes more work than its bytes allow. Its text says why."""


class _Parts:
    """Counts parts of an answer. Raises: CostlyAnswer for more than its bytes allow."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._num_parts += 1
        self._num_bytes += num_bytes
        if self._num_parts > FREE_PARTS + self._num_bytes // MIN_PART_BYTES:
            raise CostlyAnswer(f"its answer comes in parts of less than {MIN_PART_BYTES} bytes")


class ImageTransport(httpx.AsyncBaseTransport):
    """Used only on the event loop; `aclose` it. No connection serves two requests."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context, max_connections=None, max_keepalive_connections=0, network_backend=_CountedBackend()
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """request: without a body. Raises: CostlyAnswer and other errors of httpx."""
        url = request.url
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            extensions=request.extensions,
        )
        try:
            answer = await self._pool.handle_async_request(asked)
        except _FAILURES as error:
            raise _as_httpx(error) from error
        stream = answer.extensions["network_stream"]
        if isinstance(stream, _CountedStream):
            stream.is_head = False
        assert isinstance(answer.stream, AsyncIterable)
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer.stream), request=request)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts = _Parts()
        try:
            async for part in self._stream:
                parts.add(len(part))
                yield part
        except _FAILURES as error:
            raise _as_httpx(error) from error

    async def aclose(self) -> None:
        await self._stream.aclose()


class _CountedBackend(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _CountedStream(await self._backend.connect_tcp(host, port, timeout, local_address, socket_options))


class _CountedStream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._parts = _Parts()
        self._num_interim = 0
        self.is_head = True
        """The answer's own header has not come yet."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._parts.add(len(data))
        if self.is_head:
            # one that is cut between two readings is not seen, and these are counted
            self._num_interim += len(_INTERIM.findall(data))
            if self._num_interim > MAX_INTERIM_ANSWERS:
                raise CostlyAnswer(f"more than {MAX_INTERIM_ANSWERS} interim answers (status 1xx) came")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


_FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)


def _as_httpx(error: Exception) -> httpx.TransportError:
    """httpx's error of the same name."""
    kind = getattr(httpx, type(error).__name__, httpx.TransportError)
    found: httpx.TransportError = kind(str(error))
    return found
