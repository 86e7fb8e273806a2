"""Method handlers of gRPC: the interceptor that replaces them, and a handler made around another behaviour."""

from __future__ import annotations

import abc
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that answers each call with another handler than the servicer's."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return None if handler is None else self.replaced(handler, handler_call_details)

    @abc.abstractmethod
    def replaced(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """The handler that answers this call. handler: the servicer's, or the next interceptor's."""


def behaviour_of(handler: Any) -> Callable[[Any, Any], Any]:
    """The function of a method handler of any of the four kinds."""
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    found: Callable[[Any, Any], Any] = next(behaviour for behaviour in kinds if behaviour is not None)
    return found


def generates(handler: Any) -> bool:
    """True if the behaviour yields its answers; a coroutine returns its answer, or writes the messages of a stream itself."""
    return bool(handler.response_streaming) and not inspect.iscoroutinefunction(behaviour_of(handler))


@contextlib.asynccontextmanager
async def closed_at_end(requests: AsyncIterator[bytes]) -> AsyncIterator[None]:
    """Close a call's stream of requests when the block ends.

    gRPC's stream refers to itself until it has been read to its end: it would keep the call until garbage collection, and gRPC
    refuses new calls (REFUSED_STREAM) of a connection that has `grpc.max_concurrent_streams` calls in memory.
    """
    try:
        yield
    finally:
        # RuntimeError: a task that is being cancelled still reads; the cancellation ends the stream
        with contextlib.suppress(RuntimeError):
            await aiter(requests).aclose()  # type: ignore[attr-defined]  # gRPC's iterator is an asynchronous generator


def remade(
    handler: Any,
    behaviour: Callable[[Any, Any], Any],
    *,
    reads_stream: bool = False,
    writes_stream: bool = False,
    parse: Callable[[bytes], Any] | None = None,
    serialize: Callable[[Any], bytes] | None = None,
) -> Any:
    """The handler of a method with another behaviour.

    reads_stream: `behaviour` takes a stream of requests also where the method has one, so that gRPC reads nothing before it asks.
    writes_stream: `behaviour` writes its answer to the context also where the method has one, which a client cannot distinguish.
    parse: None gives `behaviour` the bytes of requests. serialize: None keeps the handler's.
    """
    asks = "stream" if handler.request_streaming or reads_stream else "unary"
    answers = "stream" if handler.response_streaming or writes_stream else "unary"
    make = getattr(grpc, f"{asks}_{answers}_rpc_method_handler")
    return make(behaviour, request_deserializer=parse, response_serializer=serialize or handler.response_serializer)
