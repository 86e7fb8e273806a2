"""`CallGuard`: the interceptor of a worker's server that accepts only calls with a proof of the deployment key.

A call without a valid proof is refused before its message is received: flow control keeps the message at the sender.
Health and reflection are not guarded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from pdserve.common.address.peer_address import peer_host
from pdserve.common.errors import PdServeError
from pdserve.common.rate_limited_log import RateLimitedLog
from pdserve.common.security.call_proof import PROOF_KEY, CallVerifier
from pdserve.common.security.peer_message import parsed

log = logging.getLogger(__name__)

WATCH = "/pdserve.v1.WorkerService/Watch"
"""The method that authenticates by challenge and response: its caller does not know the worker's identity yet."""
_GUARDED = "/pdserve."
Context = grpc.aio.ServicerContext[Any, Any]


class CallGuard(grpc.aio.ServerInterceptor):
    """Runs after the interceptor that turns errors into statuses."""

    def __init__(self, verifier: CallVerifier) -> None:
        self._verifier = verifier
        self._warnings = RateLimitedLog(log)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_GUARDED):
            return handler
        if method == WATCH:
            return self._guarded(handler, method, None)
        try:
            digest = self._verifier.verify(method, _proof(handler_call_details))
        except PdServeError as error:
            return self._refusal(handler, error)
        return self._guarded(handler, method, digest)

    def warn(self, context: Context, error: PdServeError) -> None:
        """One line a minute for each host."""
        host = peer_host(context.peer())
        self._warnings.warning(f"{host} {error.code}", "a call from %s is refused: %s", host, error.message)

    def _refusal(self, handler: Any, error: PdServeError) -> Any:
        """A handler that takes a stream, so that gRPC reads no message."""

        async def refuse_stream(_: object, context: Context) -> AsyncIterator[bytes]:
            self.warn(context, error)
            raise error
            yield b""  # type: ignore[unreachable]  # makes this a generator

        async def refuse(_: object, context: Context) -> bytes:
            self.warn(context, error)
            raise error

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse_stream)
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _guarded(self, handler: Any, method: str, digest: bytes | None) -> Any:
        """The handler, given messages that were checked. digest: of the first message; None where there is no proof."""

        def read(raw: bytes, context: Context, *, is_first: bool = True) -> Any:
            try:
                if is_first and digest is not None:
                    self._verifier.verify_message(method, digest, raw)
                return parsed(f"a message to {method}", handler.request_deserializer, raw)
            except PdServeError as error:
                self.warn(context, error)
                raise

        async def messages(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            is_first = True
            async for raw in requests:
                yield read(raw, context, is_first=is_first)
                is_first = False

        def stream_unary(requests: AsyncIterator[bytes], context: Context) -> Any:
            return handler.stream_unary(messages(requests, context), context)

        def stream_stream(requests: AsyncIterator[bytes], context: Context) -> Any:
            return handler.stream_stream(messages(requests, context), context)

        def unary_unary(raw: bytes, context: Context) -> Any:
            return handler.unary_unary(read(raw, context), context)

        def unary_stream(raw: bytes, context: Context) -> Any:
            return handler.unary_stream(read(raw, context), context)

        serializer = handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream_stream, response_serializer=serializer)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(stream_unary, response_serializer=serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(unary_stream, response_serializer=serializer)
        return grpc.unary_unary_rpc_method_handler(unary_unary, response_serializer=serializer)


def _proof(details: grpc.HandlerCallDetails) -> bytes | None:
    """The first of that name."""
    for name, value in details.invocation_metadata or ():
        if name == PROOF_KEY and isinstance(value, bytes):
            return value
    return None
