"""Calls that end with an error are freed at once: each holds memory of gRPC, which garbage collection does not count."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.net.body_budget import BodyBudget
from pdserve.common.net.public_server import make_public_server
from pdserve.common.net.rpc import bind, make_channel, make_server
from pdserve.common.processes import allocator
from pdserve.common.security.call_guard import CallGuard
from pdserve.common.security.call_proof import CallVerifier
from pdserve.common.security.deployment_key import DeploymentKey
from tests.support.processes.unread_client import END_HEADERS, END_STREAM, HEADERS, OPENING, frame, header_block, unread
from tests.support.run.waiting import HANG_S, eventually
from tests.support.transfers.calls_in_memory import num_calls_in_memory

NUM_CALLS = 20
NUM_CONNECTIONS, CALLS_OF_EACH = 30, 100
MOST_KEPT_BYTES = 600
"""Memory that gRPC keeps of a call whose client has left before its answer (docs/security.md)."""
REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    # what gRPC's client says where the call ended during its write (see `hides_status`)
    grpc.StatusCode.INTERNAL,
)


async def fail(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    raise InvalidRequest("no")


async def fail_in_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    raise InvalidRequest("no")
    yield b""


async def read_and_fail(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    async for _ in requests:
        raise InvalidRequest("no")
    return b""


async def read_and_fail_in_stream(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    async for _ in requests:
        raise InvalidRequest("no")
    yield b""


HANDLERS: Any = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(fail),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(fail_in_stream),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(fail),
    "StreamStream": grpc.stream_stream_rpc_method_handler(fail_in_stream),
    "ReadStreamUnary": grpc.stream_unary_rpc_method_handler(read_and_fail),
    "ReadStreamStream": grpc.stream_stream_rpc_method_handler(read_and_fail_in_stream),
}


async def accept(context: Any) -> None:
    pass


async def refuse(context: Any) -> None:
    raise InvalidRequest("no")


async def decode(data: bytes, parse: Any) -> Any:
    return data


def public(authenticate: Any) -> grpc.aio.Server:
    return make_public_server(
        authenticate, decode, BodyBudget(1 << 20), max_request_bytes=1 << 16, max_connections=8, read_timeout_s=HANG_S
    )


SERVERS = {
    "failed": make_server,
    "without a proof": lambda: make_server(CallGuard(CallVerifier(DeploymentKey(b"k" * 32), lambda: ("w", 1)))),
    "failed at the front end": lambda: public(accept),
    "not authenticated": lambda: public(refuse),
}


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("method", HANDLERS)
async def test_an_ended_call_is_freed_without_garbage_collection(kind: str, method: str) -> None:
    server = SERVERS[kind]()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdserve.v1.Test", HANDLERS),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    before = num_calls_in_memory()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            ask: Any = channel.stream_stream(f"/pdserve.v1.Test/{method}")
            for _ in range(NUM_CALLS):
                call: Any = ask(iter([b"x"]), timeout=HANG_S)
                assert await call.code() in REFUSED
            # the server has one ready for the next call
            await eventually(
                lambda: num_calls_in_memory() <= before + 1,
                lambda: f"{num_calls_in_memory() - before} of {NUM_CALLS} are kept",
            )
    finally:
        await server.stop(None)


@pytest.mark.few(1)
@pytest.mark.skipif(not allocator.is_known(), reason="glibc 2.33 counts what is in use")
@pytest.mark.parametrize("service", ["pdserve.v1.Test", "Unknown"])
async def test_a_call_whose_client_has_left_keeps_little_memory(caplog: pytest.LogCaptureFixture, service: str) -> None:
    # each is logged, and the log of a test would keep them
    caplog.set_level(logging.CRITICAL)
    server = make_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdserve.v1.Test", HANDLERS),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    block = header_block(f"/{service}/StreamUnary")
    calls = OPENING + b"".join(
        frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block) for number in range(CALLS_OF_EACH)
    )

    def leave(num_connections: int) -> None:
        for _ in range(num_connections):
            with unread(f"127.0.0.1:{port}", [calls]):
                pass

    def settled_bytes() -> int:
        gc.collect()
        return allocator.bytes_in_use()

    try:
        await asyncio.to_thread(leave, 3)
        await asyncio.sleep(1.0)
        before = settled_bytes()
        await asyncio.to_thread(leave, NUM_CONNECTIONS)
        most = NUM_CONNECTIONS * CALLS_OF_EACH * MOST_KEPT_BYTES
        # a collection of all that a run of tests has made takes so long that looks without a pause would leave the server, which
        # runs in this loop, no time to end its calls
        await eventually(
            lambda: settled_bytes() < before + most, lambda: f"{settled_bytes() - before} bytes are kept", pause_s=0.5
        )
    finally:
        await server.stop(None)
