"""Every gRPC channel and server is made here, and errors are translated here, in both directions.

Keepalive ends a lease when a peer dies silently. Both sides ping each second, also on idle channels, and break the
connection 3.5 s after an unanswered ping, so a silent host is noticed within 5 s. A shorter limit takes a busy or
briefly suspended machine for a dead one; gRPC's defaults notice nothing for minutes, and its servers refuse such pings.
A process that ends closes its sockets, which its peers notice at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, cast

import grpc
import grpc.aio

from pdserve.common import errors
from pdserve.common.address.host_address import host_and_port
from pdserve.common.address.peer_address import grpc_target
from pdserve.common.errors import ConfigError, InternalError, PdServeError
from pdserve.common.method_handler import Context, HandlerInterceptor, behaviour_of, closed_at_end, generates, remade
from pdserve.common.net.renewed_channel import RenewedChannel
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.security.tls import ClientTls, ServerTls

log = logging.getLogger(__name__)

_Closing = Callable[[Any], contextlib.AbstractAsyncContextManager[None]]
"""Makes of a call's requests the context in which its handler runs."""

ERROR_CODE_KEY = "pdserve-error-code"
ERROR_FIELD_KEY = "pdserve-error-field"
"""Metadata key of the field at fault of an `InvalidRequest`."""
RETRY_AFTER_KEY = "pdserve-retry-after-s"
_REFUSED_STREAM = "RST_STREAM with error code 7"
"""Stands in the status of a call that the server's gRPC has refused unseen, above `MAX_STREAMS_PER_CONNECTION`."""
_TOO_LARGE = "message larger than max"
"""Stands in the status with which gRPC itself refuses a message."""
_MAX_DETAILS_BYTES = 2000
"""Characters of a message: peers may refuse more than 8 KiB of trailing metadata, and gRPC writes a byte as up to three."""

PING_EVERY_MS = 1000
PING_TIMEOUT_MS = 3500
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
MAX_STREAMS_PER_CONNECTION = 100
"""Calls that a peer may have open on one connection; gRPC refuses most of those beyond them. Each takes 15 to 20 KB here from its
headers on, also the call of a stranger."""
MAX_PEER_CONNECTIONS = 1024
MAX_PEER_CONNECTIONS_PER_ADDRESS = MAX_PEER_CONNECTIONS // 4
"""Routers and workers keep one each; several may share an address."""
ENDURED_PINGS = [("grpc.http2.max_ping_strikes", 0)]
"""Pings never close a connection. With a limit, each ping beyond it is kept, at 800 bytes, until the peer has read why its
connection ends, and a peer may never read; without one, gRPC stops reading from a peer that has 10,000 answers unread."""
_IDENTITY_ONLY = 1
"""A bit set of gRPC's compression algorithms: what is compressed would be inflated before its size is known."""
_CHANNEL_OPTIONS = [
    *_KEEPALIVE,
    # one connection a channel: channels to the same address from one process share no fate
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS = [
    *_KEEPALIVE,
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ONLY),
    *ENDURED_PINGS,
    ("grpc.max_allowed_incoming_connections", MAX_PEER_CONNECTIONS),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5000),
]


def _limits(max_received_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


class Transport(Protocol):
    """What makes channels and servers. A simulation has one without sockets."""

    def channel(self, address: str, tls: ClientTls | None, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        """A channel to `host:port`."""

    def server(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
    ) -> grpc.aio.Server:
        """A server that listens nowhere yet."""


class _Grpc:
    """gRPC over TCP."""

    def channel(self, address: str, tls: ClientTls | None, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(grpc_target(address), options=list(options))
        return RenewedChannel(tls, lambda generation: _secure_channel(address, generation, list(options)))

    def server(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
    ) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=list(interceptors), options=list(options))


_transport: Transport = _Grpc()


@contextlib.contextmanager
def transported_by(transport: Transport) -> Iterator[None]:
    """Make channels and servers with this transport until the block ends."""
    global _transport
    before, _transport = _transport, transport
    try:
        yield
    finally:
        _transport = before


def make_channel(
    address: str, tls: ClientTls | None = None, *, max_received_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to `host:port` with the keepalive that leases rely on. tls: None for no encryption.

    With TLS each call uses the certificates that are current then; running calls continue (`RenewedChannel`).
    max_received_bytes: of one message; a larger one ends its call.
    """
    return _transport.channel(address, tls, [*_CHANNEL_OPTIONS, *_limits(max_received_bytes)])


def _secure_channel(address: str, tls: ClientTls, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name is not None else []
    return grpc.aio.secure_channel(grpc_target(address), credentials, options=[*options, *name])


def make_server(
    *guards: grpc.aio.ServerInterceptor,
    max_received_bytes: int = MAX_MESSAGE_BYTES,
    max_streams: int = MAX_STREAMS_PER_CONNECTION,
) -> grpc.aio.Server:
    """A server with the keepalive that leases rely on, whose handlers may raise `PdServeError`.

    guards: what each call passes before its handler, in this order. max_received_bytes: of one message; a larger one is
    refused before it is received. max_streams: open calls of one connection. Compressed messages are refused.
    """
    options = [*_SERVER_OPTIONS, *_limits(max_received_bytes), ("grpc.max_concurrent_streams", max_streams)]
    return _transport.server([ErrorInterceptor(), *guards], options)


def bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None = None) -> int:
    """Listen on host:port (0 draws a free port) and return the port. tls: None for no encryption.

    Raises: ConfigError naming the address, when it is in use or not of this machine.
    """
    address = host_and_port(host, port)
    try:
        bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: in use, or not an address of this machine") from error
    if bound == 0:
        raise ConfigError(f"cannot listen on {address}: in use, or not an address of this machine")
    return bound


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Each handshake is made with the generation that is current then."""
    used = tls.current

    def configuration(generation: ServerTls) -> grpc.ServerCertificateConfiguration:
        pair = (generation.key, generation.certificate)
        return grpc.ssl_server_certificate_configuration([pair], generation.client_ca)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (current := tls.current) is used:
            return None
        used = current
        return configuration(current)

    # the type stubs do not allow None, which changes nothing
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], renewed)
    return grpc.dynamic_ssl_server_credentials(configuration(used), fetch, tls.client_ca is not None)


def metadata_of(context: Context) -> dict[str, str]:
    """The caller's metadata, names in lower case; of a name that was sent several times, the last value."""
    return {key.lower(): _as_text(value) for key, value in context.invocation_metadata() or ()}


def metadata_values(context: Context, name: str) -> list[str]:
    """Every value that the caller sent under this name, which is in lower case."""
    return [_as_text(value) for key, value in context.invocation_metadata() or () if key.lower() == name]


def _as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def from_rpc_error(error: grpc.aio.AioRpcError) -> PdServeError:
    """The error of a failed call. A status without our code comes from the channel itself, not from a servicer."""
    code = _metadata_value(error, ERROR_CODE_KEY)
    message = error.details() or ""
    if code is not None:
        rebuilt = errors.from_code(code, message, _metadata_value(error, ERROR_FIELD_KEY), _retry_after_s(error))
        if isinstance(rebuilt, errors.Overloaded):
            rebuilt.by_peer = True
        return rebuilt
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if _REFUSED_STREAM in message:
            return errors.Overloaded("the peer takes no more calls on this connection")
        case grpc.StatusCode.UNAVAILABLE:
            return errors.WorkerLost(message or "the peer is unreachable")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(message or "the call's deadline passed")
        case grpc.StatusCode.CANCELLED:
            return errors.Cancelled(message or "the call was cancelled")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequest(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _TOO_LARGE in message:
            # the channel's own refusal: another attempt would be refused, too
            return errors.BodyTooLarge(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(message)
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL:
            return errors.WorkerLost(f"the call broke: {message}")
        case _:
            # no servicer of ours returns this without a code of ours
            return errors.PeerError(f"{error.code().name}: {message}")


def hides_status(error: grpc.aio.AioRpcError) -> bool:
    """True if the channel's own status has replaced that of the server: the call ended during a write of this side.

    grpc.aio reports such a write before the status that the server has sent, and drops the latter.
    """
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"


def failed_to_shake_hands(message: str) -> bool:
    """True if a call that never reached its server failed at TLS, judged by gRPC's text, since no status shows it.

    A server that rejects a client's certificate, or gets no TLS, closes the connection without a message.
    """
    words = ("handshake failed", "verification check failed", "socket closed")
    return "failed to connect" in message and any(word in message.lower() for word in words)


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    try:
        return float(_metadata_value(error, RETRY_AFTER_KEY) or errors.DEFAULT_RETRY_AFTER_S)
    except ValueError:
        return errors.DEFAULT_RETRY_AFTER_S


def _metadata_value(error: grpc.aio.AioRpcError, key: str) -> str | None:
    for name, value in error.trailing_metadata() or ():
        if name == key:
            return value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return None


async def abort_with(context: Context, error: PdServeError) -> NoReturn:
    """End the call with the error's status and its code in the trailing metadata, next to what is in there already."""
    metadata = [*(context.trailing_metadata() or ()), (ERROR_CODE_KEY, error.code)]
    if isinstance(error, errors.Overloaded):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    if error.field and error.field.isascii() and error.field.isprintable():
        metadata.append((ERROR_FIELD_KEY, error.field))
    details = error.message.encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    await context.abort(error.grpc_status, details, tuple(metadata))
    raise AssertionError("abort returned")  # pragma: no cover - abort always raises


class ErrorInterceptor(HandlerInterceptor):
    """`PdServeError` from a handler becomes its status; anything else is logged with its traceback and INTERNAL.

    A stream of requests is closed when its handler ends (`closed_at_end`).
    """

    def replaced(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        # health and reflection come with grpc and keep their own handlers
        if not details.method.startswith("/pdserve."):
            return handler
        translate: Callable[..., Any] = translate_generator if generates(handler) else translate_coroutine
        closing: _Closing = closed_at_end if handler.request_streaming else contextlib.nullcontext
        return remade(handler, translate(behaviour_of(handler), closing), parse=handler.request_deserializer)


async def _ended_with(context: Context, error: Exception) -> grpc.aio.AbortError:
    """End the call with what a handler raised. Returns: what the handler has to raise when it holds the call no longer.

    The call refers to that error, and the error's traceback to each frame that it passes: a frame that still held the call would
    keep it until garbage collection (see `closed_at_end`).
    """
    if not isinstance(error, grpc.aio.AbortError):
        if not isinstance(error, PdServeError):
            log.error("a handler failed", exc_info=error)
            error = InternalError("internal error; the service's log has the details")
        try:
            await abort_with(context, error)
        except grpc.aio.AbortError as aborted:
            # the code that raised it may keep it, as `CallGuard` keeps its refusals
            error.__traceback__ = error.__context__ = None
            error = aborted
    error.__traceback__ = error.__context__ = None
    return error


def translate_generator(
    behaviour: Callable[[Any, Any], AsyncIterator[Any]], closing: _Closing
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """As `translate_coroutine`, for a handler of many answers."""

    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with closing(request):
                async for response in behaviour(request, context):
                    yield response
        except Exception as error:
            ended = await _ended_with(context, error)
        else:
            return
        del request, context
        try:
            raise ended
        finally:
            # its traceback leads to this frame
            del ended

    return call


def translate_coroutine(
    behaviour: Callable[[Any, Any], Awaitable[Any]], closing: _Closing
) -> Callable[[Any, Any], Awaitable[Any]]:
    """A handler of one answer that ends its call with the status of what `behaviour` raises. closing: closes the request."""

    async def call(request: Any, context: Context) -> Any:
        try:
            async with closing(request):
                return await behaviour(request, context)
        except Exception as error:
            ended = await _ended_with(context, error)
        del request, context
        try:
            raise ended
        finally:
            # its traceback leads to this frame
            del ended

    return call
