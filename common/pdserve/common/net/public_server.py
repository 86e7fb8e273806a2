"""`make_public_server`: a gRPC server for clients. It reads nothing of a call before the caller is authenticated.

Servers between services are made in `common/net/rpc.py`; their keepalive, which ends leases within seconds, would disconnect
clients that stop for a moment, and their messages are larger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from pdserve.common.errors import InvalidRequest
from pdserve.common.method_handler import Context, HandlerInterceptor, behaviour_of, generates, remade
from pdserve.common.net.body_budget import BodyBudget
from pdserve.common.net.open_calls import OpenCalls
from pdserve.common.net.rpc import ENDURED_PINGS, MAX_STREAMS_PER_CONNECTION, ErrorInterceptor
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.security.tls import ClientTls

MAX_CONCURRENT_RPCS = 4096
_SERVICE = "/pdserve."
_IDENTITY_ONLY = 1
"""A bit set of gRPC's compression algorithms."""

Authenticate = Callable[[Context], Awaitable[None]]
"""Looks at a call's metadata and peer. Raises: Unauthenticated."""
Decode = Callable[[bytes, Callable[[bytes], Any]], Awaitable[Any]]
"""A message's bytes and what parses them -> the message. Raises: InvalidRequest."""

_CLIENT_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
]


def _options(max_request_bytes: int, max_connections: int, *, reuse_port: bool) -> list[tuple[str, int]]:
    return [
        *_CLIENT_KEEPALIVE,
        # half as much again is received, so that the refusal can carry our code; beyond that the channel refuses
        ("grpc.max_receive_message_length", max_request_bytes + max_request_bytes // 2),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", max_connections),
        # clients connect again unseen; a stranger's connection takes a place for no longer
        ("grpc.max_connection_idle_ms", 60_000),
        # streams of an aged connection continue; new calls use a new connection
        ("grpc.max_connection_age_ms", 3_600_000),
        *ENDURED_PINGS,
        ("grpc.server_handshake_timeout_ms", 5000),
        ("grpc.so_reuseport", int(reuse_port)),
    ]


def make_public_server(
    authenticate: Authenticate,
    decode: Decode,
    budget: BodyBudget,
    *,
    max_request_bytes: int,
    max_connections: int,
    read_timeout_s: float,
    reuse_port: bool = False,
) -> grpc.aio.Server:
    """A server whose handlers may raise `PdServeError`.

    authenticate: called before any message of a call is read; not for health and reflection.
    decode: makes messages of bytes, in a thread where that takes long. budget: for messages being read.
    max_request_bytes: of a message. max_connections: more are closed at once. read_timeout_s: within which a call that
    has one message must have sent it. reuse_port: other processes of this user may listen on the same port; the kernel
    divides new connections among them.
    """
    public = _PublicInterceptor(authenticate, decode, budget, max_request_bytes, read_timeout_s)
    return grpc.aio.server(
        interceptors=[ErrorInterceptor(), public],
        options=_options(max_request_bytes, max_connections, reuse_port=reuse_port),
        maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
    )


def make_public_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A client's channel to a public server at `host:port`. tls: None for no encryption."""
    options = [
        *_CLIENT_KEEPALIVE,
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name is not None else []
    return grpc.aio.secure_channel(address, credentials, options=[*options, *name])


class _PublicInterceptor(HandlerInterceptor):
    """Turns each handler into one that reads by itself: gRPC would read a unary request before any code of ours runs."""

    def __init__(
        self,
        authenticate: Authenticate,
        decode: Decode,
        budget: BodyBudget,
        max_request_bytes: int,
        read_timeout_s: float,
    ) -> None:
        self._authenticate = authenticate
        self._decode = decode
        self._max_request_bytes = max_request_bytes
        self._read_timeout_s = read_timeout_s
        self._budget = budget
        self._open_calls = OpenCalls(max_request_bytes, budget.max_bytes)

    def replaced(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        if not details.method.startswith(_SERVICE):
            return self._open_calls.bounded(handler)
        return self._guarded(handler)

    def _guarded(self, handler: Any) -> Any:
        """Wrap a handler: it authenticates the caller before it reads, within the limit and the budget."""
        parse = handler.request_deserializer

        async def first(requests: AsyncIterator[bytes]) -> Any:
            async with self._budget.room(self._max_request_bytes) as room:
                raw = await room.read(anext(requests, None), self._read_timeout_s)
                return await self._message(raw, parse)

        async def each(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            # a session may rest between two messages: no room is held for the next
            async for raw in requests:
                yield await self._message(raw, parse)

        answer = behaviour_of(handler)

        async def stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            await self._authenticate(context)
            asked = each(requests) if handler.request_streaming else await first(requests)
            async for response in answer(asked, context):
                yield response

        async def coroutine(requests: AsyncIterator[bytes], context: Context) -> None:
            await self._authenticate(context)
            # a method of one answer may write it itself, to hold what it holds until the client has read it
            response = await answer(each(requests) if handler.request_streaming else await first(requests), context)
            if response is not None:
                await context.write(response)

        guarded: Callable[..., Any] = stream if generates(handler) else coroutine
        return remade(handler, guarded, reads_stream=True, writes_stream=True, serialize=_serializer(handler))

    async def _message(self, raw: bytes | None, parse: Callable[[bytes], Any]) -> Any:
        if raw is None:
            raise InvalidRequest("the call ended without a message")
        return await self._decode(raw, parse)


def _serializer(handler: Any) -> Callable[[Any], bytes]:
    """A handler may return the bytes of a large message, which it has made in a thread: gRPC would in the event loop."""
    serialize = handler.response_serializer
    return lambda response: response if isinstance(response, bytes) else serialize(response)
