"""`CallGuard`: the interceptor of a worker's server that accepts only calls with a proof of the deployment key.

A call without a valid proof is refused before its message is received: flow control keeps the message at the sender.
Health and reflection are not guarded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdserve.common.address.peer_address import peer_host
from pdserve.common.errors import PdServeError
from pdserve.common.method_handler import Context, HandlerInterceptor, behaviour_of, remade
from pdserve.common.rate_limited_log import RateLimitedLog
from pdserve.common.security.call_proof import PROOF_KEY, CallVerifier
from pdserve.common.security.peer_message import parsed

log = logging.getLogger(__name__)

WATCH = "/pdserve.v1.WorkerService/Watch"
"""The method that authenticates by challenge and response: its caller does not have the worker's identity yet."""
_GUARDED = "/pdserve."


class CallGuard(HandlerInterceptor):
    """Runs after the interceptor that turns errors into statuses."""

    def __init__(self, verifier: CallVerifier) -> None:
        self._verifier = verifier
        self._warnings = RateLimitedLog(log)

    def replaced(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        method = details.method
        if not method.startswith(_GUARDED):
            return handler
        if method == WATCH:
            return self._guarded(handler, method, None)
        try:
            digest = self._verifier.verify(method, _proof(details))
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

        return remade(handler, refuse_stream if handler.response_streaming else refuse, reads_stream=True)

    def _guarded(self, handler: Any, method: str, digest: bytes | None) -> Any:
        """The handler, given messages that were checked. digest: of the first message; None where there is no proof."""

        behaviour = behaviour_of(handler)

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

        def of_stream(requests: AsyncIterator[bytes], context: Context) -> Any:
            return behaviour(messages(requests, context), context)

        def of_message(raw: bytes, context: Context) -> Any:
            return behaviour(read(raw, context), context)

        return remade(handler, of_stream if handler.request_streaming else of_message)


def _proof(details: grpc.HandlerCallDetails) -> bytes | None:
    """The first of that name."""
    for name, value in details.invocation_metadata or ():
        if name == PROOF_KEY and isinstance(value, bytes):
            return value
    return None
