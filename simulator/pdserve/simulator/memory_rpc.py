"""gRPC between the services of one simulation, without sockets: what `common/net/rpc.py` uses of `grpc.aio`.

    MemoryRpc.channel(address) --> call --> handler of the server that is bound there

Messages are serialized as on a wire, arrive `latency_s` after they were sent, and in order. A call that is refused, cancelled or
aborted ends at both sides with the statuses of gRPC. What is not there: flow control, pings and TLS.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from pdserve.common.method_handler import behaviour_of, generates

LATENCY_S = 50e-6
"""Default seconds from one service to another."""
_PEER = "ipv4:127.0.0.1:1"
_END = object()


class _Failure(Exception):
    """The status with which a call has ended."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        super().__init__(details)
        self.code, self.details, self.trailing = code, details, trailing

    def as_error(self) -> grpc.aio.AioRpcError:
        trailing = grpc.aio.Metadata(*self.trailing)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), trailing, self.details)


class _Pipe:
    """One direction of a call: messages, then an end or a failure. Each arrives after the latency."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.is_over = False
        """True after the end was read."""

    def send(self, message: Any) -> None:
        """message: bytes, `_END` or a `_Failure`."""
        self._loop.call_at(self._loop.time() + self._latency_s, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        self._arrived.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Any:
        """The next message; `_END` at the end, again and again. Raises: `_Failure`."""
        while not self._arrived:
            self._waiter = self._loop.create_future()
            await self._waiter
        message = self._arrived[0]
        if isinstance(message, _Failure):
            self.is_over = True
            raise message
        if message is _END:
            self.is_over = True
        else:
            self._arrived.popleft()
        return message


class _Context:
    """A handler's side of a call: what handlers here use of `grpc.aio.ServicerContext`."""

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]], answers: _Pipe) -> None:
        self._metadata = tuple(metadata)
        self._answers = answers

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return ()

    def peer(self) -> str:
        return _PEER

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        self._answers.send(_Failure(code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError


class MemoryServer:
    """As `grpc.aio.server`."""

    def __init__(self, rpc: MemoryRpc, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._rpc = rpc
        self._interceptors = tuple(interceptors)
        self._handlers: dict[str, Any] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._addresses: list[str] = []
        self._calls: set[asyncio.Task[None]] = set()
        self.is_serving = False

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service_name}/{name}": handler for name, handler in method_handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        port = self._rpc.take(address, self)
        self._addresses.append(port[0])
        return port[1]

    async def start(self) -> None:
        self.is_serving = True
        self._rpc.has_changed()

    async def stop(self, grace: float | None) -> None:
        """Refuse calls; those that are open have the grace, then end as those of a process that has ended."""
        self.is_serving = False
        if self._calls and grace:
            await asyncio.wait(self._calls, timeout=grace)
        for task in self._calls:
            task.cancel()
        for address in self._addresses:
            self._rpc.servers.pop(address, None)
        self._rpc.has_changed()

    def begin(
        self, path: str, metadata: Sequence[tuple[str, str | bytes]], asked: _Pipe, answers: _Pipe
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(path, metadata, asked, answers), name=path)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _handler(self, details: grpc.HandlerCallDetails) -> Any:
        async def find(given: grpc.HandlerCallDetails) -> Any:
            if (handler := self._handlers.get(given.method)) is not None:
                return handler
            return next((found for each in self._generic if (found := each.service(given)) is not None), None)

        continuation: Callable[[grpc.HandlerCallDetails], Any] = find
        for interceptor in reversed(self._interceptors):
            continuation = _intercepted(interceptor, continuation)
        return await continuation(details)

    async def _run(self, path: str, metadata: Sequence[tuple[str, str | bytes]], asked: _Pipe, answers: _Pipe) -> None:
        try:
            handler = await self._handler(_Details(path, tuple(metadata)))
            if handler is None:
                raise _Failure(grpc.StatusCode.UNIMPLEMENTED, f"no method {path}")
            await _handle(handler, metadata, asked, answers)
        except _Failure as failure:
            answers.send(failure)
        except asyncio.CancelledError:
            answers.send(_Failure(grpc.StatusCode.UNAVAILABLE, "the server has ended"))
            raise
        except grpc.aio.AbortError:
            pass  # its status is on its way
        except Exception as error:
            answers.send(_Failure(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"))
        else:
            answers.send(_END)


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.method = method
        self.invocation_metadata = metadata


def _intercepted(interceptor: grpc.aio.ServerInterceptor, continuation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def intercept(details: grpc.HandlerCallDetails) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return intercept


async def _handle(handler: Any, metadata: Sequence[tuple[str, str | bytes]], asked: _Pipe, answers: _Pipe) -> None:
    parse = handler.request_deserializer or _unchanged
    serialize = handler.response_serializer or _unchanged
    context = _Context(metadata, answers)

    async def requests() -> AsyncIterator[Any]:
        while (message := await asked.receive()) is not _END:
            yield parse(message)

    if handler.request_streaming:
        request: Any = requests()
    elif (message := await asked.receive()) is _END:
        raise _Failure(grpc.StatusCode.INTERNAL, "the call has no request")
    else:
        request = parse(message)
    answer = behaviour_of(handler)(request, context)
    if generates(handler):
        async for response in answer:
            answers.send(serialize(response))
    elif (response := await answer) is not None:
        answers.send(serialize(response))


def _unchanged(message: Any) -> Any:
    return message


class _Call:
    """A caller's side: what callers here use of `grpc.aio`'s calls."""

    def __init__(
        self, rpc: MemoryRpc, address: str, path: str, metadata: Any, serialize: Any, parse: Any, timeout: float | None
    ) -> None:
        self._asked, self._answers = _Pipe(rpc.latency_s), _Pipe(rpc.latency_s)
        self._serialize, self._parse = serialize or _unchanged, parse or _unchanged
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(rpc.latency_s, self._reach, rpc, address, path, tuple(metadata or ()))
        self._deadline = None if timeout is None else self._loop.call_later(timeout, self._expire)

    def _reach(self, rpc: MemoryRpc, address: str, path: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        server = rpc.servers.get(address)
        if server is None or not server.is_serving:
            self._answers.send(_Failure(grpc.StatusCode.UNAVAILABLE, f"nobody listens at {address}"))
        elif not self._is_cancelled:
            self._task = server.begin(path, metadata, self._asked, self._answers)

    def _expire(self) -> None:
        self._end(_Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's deadline passed"))

    def _end(self, failure: _Failure) -> None:
        self._answers._arrive(failure)
        self._asked.send(failure)
        if self._task is not None:
            self._loop.call_later(self._asked._latency_s, self._task.cancel)

    def cancel(self) -> bool:
        if self._is_cancelled or self._answers.is_over:
            return False
        self._is_cancelled = True
        self._end(_Failure(grpc.StatusCode.CANCELLED, "the call was cancelled"))
        return True

    def done(self) -> bool:
        return self._answers.is_over or self._is_cancelled

    async def write(self, message: Any) -> None:
        """Raises: asyncio.InvalidStateError after the call's end."""
        if self.done():
            raise asyncio.InvalidStateError("the call has ended")
        self._asked.send(self._serialize(message))

    async def done_writing(self) -> None:
        self._asked.send(_END)

    async def read(self) -> Any:
        """The next answer, or `grpc.aio.EOF`. Raises: AioRpcError."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        try:
            message = await self._answers.receive()
        except _Failure as failure:
            self._finish()
            raise failure.as_error() from None
        if message is _END:
            self._finish()
            return grpc.aio.EOF
        return self._parse(message)

    def _finish(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    async def only_answer(self, request: Any) -> Any:
        await self.write(request)
        await self.done_writing()
        if (answer := await self.read()) is grpc.aio.EOF:
            raise _Failure(grpc.StatusCode.INTERNAL, "the call has no answer").as_error()
        self._finish()
        return answer


class MemoryChannel:
    """As `grpc.aio.Channel`."""

    def __init__(self, rpc: MemoryRpc, address: str) -> None:
        self._rpc = rpc
        self._address = address
        self._open: set[_Call] = set()

    def unary_unary(self, path: str, serialize: Any = None, parse: Any = None) -> Callable[..., Any]:
        async def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            return await self._begin(path, serialize, parse, metadata, timeout).only_answer(request)

        return call

    def stream_stream(self, path: str, serialize: Any = None, parse: Any = None) -> Callable[..., _Call]:
        def call(timeout: float | None = None, metadata: Any = None) -> _Call:
            return self._begin(path, serialize, parse, metadata, timeout)

        return call

    def _begin(self, path: str, serialize: Any, parse: Any, metadata: Any, timeout: float | None) -> _Call:
        call = _Call(self._rpc, self._address, path, metadata, serialize, parse, timeout)
        self._open = {each for each in self._open if not each.done()} | {call}
        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        server = self._rpc.servers.get(self._address)
        is_there = server is not None and server.is_serving
        return grpc.ChannelConnectivity.READY if is_there else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def channel_ready(self) -> None:
        while self.get_state() is not grpc.ChannelConnectivity.READY:
            await self._rpc.change()

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while self.get_state() is last_observed_state:
            await self._rpc.change()

    async def close(self, grace: float | None = None) -> None:
        for call in self._open:
            call.cancel()


class MemoryRpc:
    """The servers of a simulation, by address; a `Transport` of `common/net/rpc.py`."""

    def __init__(self, latency_s: float = LATENCY_S) -> None:
        self.latency_s = latency_s
        self.servers: dict[str, MemoryServer] = {}
        self._ports = itertools.count(20_000)
        self._changed: asyncio.Future[None] | None = None

    async def change(self) -> None:
        """Wait until a server begins or ends."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def has_changed(self) -> None:
        """A server has begun, or has ended."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)

    def channel(self, address: str, *_: Any, **__: Any) -> Any:
        return MemoryChannel(self, address)

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], *_: Any, **__: Any) -> Any:
        return MemoryServer(self, interceptors)

    def take(self, address: str, server: MemoryServer) -> tuple[str, int]:
        """Bind a server to host:port; port 0 draws one."""
        host, _, port = address.rpartition(":")
        number = int(port) or next(self._ports)
        bound = f"{host}:{number}"
        if bound in self.servers:
            raise RuntimeError(f"{bound} is in use")
        self.servers[bound] = server
        return bound, number
