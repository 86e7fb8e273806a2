"""gRPC without sockets, with the interceptor and the error translation of every service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.common.errors import Draining, PdServeError, WorkerLost
from pdserve.common.net.rpc import bind, from_rpc_error, make_channel, make_server, transported_by
from pdserve.simulator.memory_rpc import MemoryRpc
from pdserve.simulator.virtual_time import VirtualTime, run_virtually

LATENCY_S = 0.25


class Servicer:
    """Methods of every kind that services between routers and workers have."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def double(self, request: bytes, context: Any) -> bytes:
        return request + request

    async def refuse(self, request: bytes, context: Any) -> bytes:
        raise Draining("it is leaving")

    async def break_down(self, request: bytes, context: Any) -> bytes:
        raise ValueError("a secret")

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                if request == b"fail":
                    raise Draining("in the middle")
                yield request
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def handlers(self) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            "pdserve.v1.Test",
            {
                "Double": unary(self.double),
                "Refuse": unary(self.refuse),
                "Break": unary(self.break_down),
                "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
            },
        )


def run(main: Callable[[Any, Servicer, grpc.aio.Server, VirtualTime], Awaitable[Any]]) -> Any:
    """main: gets a channel, its servicer and server."""

    async def serve(virtual: VirtualTime) -> Any:
        with transported_by(MemoryRpc(LATENCY_S)):
            server, servicer = make_server(), Servicer()
            server.add_generic_rpc_handlers((servicer.handlers(),))
            port = bind(server, "127.0.0.1", 0)
            await server.start()
            async with asyncio.timeout(1000.0):
                return await main(make_channel(f"127.0.0.1:{port}"), servicer, server, virtual)

    return run_virtually(serve)


async def failed(call: Awaitable[Any]) -> PdServeError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def test_a_call_takes_two_ways() -> None:
    async def main(
        channel: Any, servicer: Servicer, server: grpc.aio.Server, virtual: VirtualTime
    ) -> tuple[bytes, float]:
        return await channel.unary_unary("/pdserve.v1.Test/Double")(b"ab"), virtual.now_s

    answer, took_s = run(main)
    assert answer == b"abab"
    assert took_s == pytest.approx(2 * LATENCY_S)


def test_errors_arrive_as_over_a_wire() -> None:
    async def main(
        channel: Any, servicer: Servicer, server: grpc.aio.Server, virtual: VirtualTime
    ) -> list[PdServeError]:
        names = ("Refuse", "Break", "Unknown")
        return [await failed(channel.unary_unary(f"/pdserve.v1.Test/{name}")(b"")) for name in names]

    refused, broken, unknown = run(main)
    assert isinstance(refused, Draining)
    assert refused.message == "it is leaving"
    assert broken.code == "internal_error"
    assert "secret" not in broken.message
    assert "UNIMPLEMENTED" in unknown.message


def test_messages_of_a_stream_come_in_order_until_an_error() -> None:
    async def main(channel: Any, servicer: Servicer, server: grpc.aio.Server, virtual: VirtualTime) -> Any:
        call = channel.stream_stream("/pdserve.v1.Test/Echo")()
        for number in range(20):
            await call.write(b"%d" % number)
        seen = [await call.read() for _ in range(20)]
        await call.write(b"fail")
        error = await failed(call.read())
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"more")
        return seen, error

    seen, error = run(main)
    assert seen == [b"%d" % number for number in range(20)]
    assert isinstance(error, Draining)


def test_a_stream_ends_when_its_caller_has_nothing_more() -> None:
    async def main(channel: Any, servicer: Servicer, server: grpc.aio.Server, virtual: VirtualTime) -> list[Any]:
        call = channel.stream_stream("/pdserve.v1.Test/Echo")()
        await call.write(b"one")
        await call.done_writing()
        return [await call.read(), await call.read(), await call.read()]

    assert run(main) == [b"one", grpc.aio.EOF, grpc.aio.EOF]


def test_a_cancelled_call_ends_its_handler() -> None:
    async def main(channel: Any, servicer: Servicer, server: grpc.aio.Server, virtual: VirtualTime) -> int:
        call = channel.stream_stream("/pdserve.v1.Test/Echo")()
        await call.write(b"one")
        assert await call.read() == b"one"
        assert call.cancel()
        assert not call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await asyncio.sleep(1.0)
        return servicer.cancelled

    assert run(main) == 1


def test_the_end_of_a_server_ends_its_calls_and_refuses_others() -> None:
    async def main(
        channel: Any, servicer: Servicer, server: grpc.aio.Server, virtual: VirtualTime
    ) -> list[PdServeError]:
        call = channel.stream_stream("/pdserve.v1.Test/Echo")()
        await call.write(b"one")
        assert await call.read() == b"one"
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await server.stop(None)
        assert channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return [await failed(call.read()), await failed(channel.unary_unary("/pdserve.v1.Test/Double")(b""))]

    for error in run(main):
        assert isinstance(error, WorkerLost)


def test_a_port_is_taken_once() -> None:
    async def main(virtual: VirtualTime) -> None:
        with transported_by(MemoryRpc()):
            port = bind(make_server(), "127.0.0.1", 0)
            with pytest.raises(PdServeError, match="in use"):
                bind(make_server(), "127.0.0.1", port)

    run_virtually(main)
