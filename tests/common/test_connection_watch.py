"""`ConnectionWatch`: the share of one address at a gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.common.errors import Overloaded, PdServeError
from pdserve.common.net.connection_watch import ConnectionWatch, close_connection
from pdserve.common.net.rpc import bind, from_rpc_error, make_channel, make_server
from tests.support.processes.unread_client import OPENING
from tests.support.run.waiting import HANG_S, eventually

PER_ADDRESS = 3


@contextlib.asynccontextmanager
async def serving(host: str = "127.0.0.1") -> AsyncIterator[tuple[str, ConnectionWatch]]:
    server = make_server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = bind(server, host, 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", ConnectionWatch(port, PER_ADDRESS)
    finally:
        await server.stop(None)


def connect(stack: contextlib.ExitStack, address: str, source: str = "127.0.0.1") -> socket.socket:
    """A connection whose handshake the server has begun."""
    host, _, port = address.rpartition(":")
    connection = stack.enter_context(
        socket.create_connection((host, int(port)), timeout=HANG_S, source_address=(source, 0))
    )
    connection.sendall(OPENING)
    assert connection.recv(9)
    return connection


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_the_newest_beyond_the_share_are_closed(host: str) -> None:
    async with serving(host) as (address, watch):
        with contextlib.ExitStack() as stack:
            first = [connect(stack, address) for _ in range(PER_ADDRESS)]
            watch.look()
            more = [connect(stack, address) for _ in range(4)]
            other = [connect(stack, address, "127.0.0.2") for _ in range(PER_ADDRESS)]
            watch.look()
            assert watch.num_refused == 4
            await eventually(lambda: not any(map(is_open, more)))
            assert all(map(is_open, first + other))
            # a place that is free again is given to the next
            first.pop().close()
            await eventually(lambda: look(watch) == PER_ADDRESS * 2 - 1)
            again = connect(stack, address)
            watch.look()
            assert is_open(again)
            assert watch.num_refused == 4


def look(watch: ConnectionWatch) -> int:
    watch.look()
    return sum(seen.network is not None for seen in watch._known.values())


async def test_a_service_within_its_share_is_served_and_no_other_socket_is_touched() -> None:
    async with serving() as (address, watch), make_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with contextlib.ExitStack() as stack:
            # connections to another port of this process
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            elsewhere = []
            for _ in range(PER_ADDRESS + 2):
                stack.enter_context(socket.create_connection(listening.getsockname()))
                elsewhere.append(stack.enter_context(listening.accept()[0]))
            for _ in range(3):
                watch.look()
                answer = await stub.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert watch.num_refused == 0
            assert all(map(is_open, elsewhere))


async def test_a_call_beyond_the_streams_of_a_connection_is_no_loss_of_the_peer() -> None:
    server = make_server(max_streams=4)
    most = num_open = 0
    released = asyncio.Event()

    async def hold(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        nonlocal most, num_open
        num_open += 1
        most = max(most, num_open)
        await released.wait()
        num_open -= 1
        return request

    handlers: Any = {"Hold": grpc.unary_unary_rpc_method_handler(hold)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        ask: Any = channel.unary_unary("/Test/Hold")

        async def one() -> PdServeError | None:
            try:
                await ask(b"x", timeout=HANG_S)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error)
            return None

        asking = [asyncio.create_task(one()) for _ in range(20)]
        await eventually(lambda: num_open == 4)
        released.set()
        errors = [error for error in await asyncio.gather(*asking) if error is not None]
        assert all(isinstance(error, Overloaded) and error.retryable for error in errors), errors
        assert len(errors) <= 16
        await eventually(lambda: num_open == 0)
    assert most <= 4
    await server.stop(None)


@pytest.mark.parametrize("name", ["ipv4:127.0.0.1:{}", "ipv6:[::ffff:127.0.0.1]:{}", "ipv6:%5B::ffff:127.0.0.1%5D:{}"])
async def test_the_connection_of_one_call_is_closed(name: str) -> None:
    async with serving("0.0.0.0") as (address, _):
        with contextlib.ExitStack() as stack:
            one, other = [await asyncio.to_thread(connect, stack, address) for _ in range(2)]
            await close_connection(name.format(one.getsockname()[1]))
            await eventually(lambda: not is_open(one))
            assert is_open(other)
            # which is no other's either
            await close_connection(name.format(one.getsockname()[1]))
            await close_connection("unix:")
            assert is_open(other)
