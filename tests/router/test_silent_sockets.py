"""Connections that say nothing, against a real process with few descriptors: both front ends go on answering."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from pdserve.common.net.public_server import make_public_channel
from pdserve.v1 import inference_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.run.waiting import HANG_S, eventually

pytestmark = pytest.mark.process

ROUTER = Path(__file__).with_name("limited_router.py")
NUM_DESCRIPTORS = 1024
"""The soft limit of most systems."""
NUM_SOCKETS = 2000
HANDSHAKE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The preface of HTTP/2 and an empty frame of settings."""
SILENT_S = 3.0
"""Limit of the HTTP server, here."""
HANDSHAKE_S = 5.0
"""Limit of the gRPC server: it closes a connection that is silent for this long."""


@contextlib.asynccontextmanager
async def router(folder: Path) -> AsyncIterator[tuple[str, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROUTER), str(folder), str(NUM_DESCRIPTORS), str(SILENT_S), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        http, address = (await asyncio.wait_for(process.stdout.readline(), HANG_S)).decode().split()
        yield http, address
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), HANG_S)


def flood(stack: contextlib.ExitStack, address: str, first: bytes) -> list[socket.socket]:
    """Sockets that send this and then nothing."""
    host, _, port = address.rpartition(":")
    sockets = []
    for _ in range(NUM_SOCKETS // 2):
        opened = stack.enter_context(socket.create_connection((host, int(port)), timeout=HANG_S))
        with contextlib.suppress(OSError):
            opened.sendall(first)
        sockets.append(opened)
    return sockets


async def get_model(address: str, timeout_s: float) -> str:
    async with make_public_channel(address) as channel:
        request = inference_pb2.GetModelRequest()
        return (await InferenceServiceStub(channel).GetModel(request, timeout=timeout_s, wait_for_ready=True)).model


async def test_resting_grpc_connections_do_not_stop_the_http_front_end(model_folder: Path) -> None:
    """They are as those of a client between two calls, so they stay for a while."""
    async with router(model_folder) as (http, address), httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        assert await get_model(address, HANG_S) == model_folder.name
        with contextlib.ExitStack() as stack:
            sockets = [*await asyncio.to_thread(flood, stack, address, HANDSHAKE)]
            await eventually(lambda: sum(map(is_open, sockets)) <= NUM_DESCRIPTORS // 2)
            for path in ("live", "metrics"):
                assert (await client.get(f"http://{http}/{path}")).status_code == 200


def is_open(opened: socket.socket) -> bool:
    opened.setblocking(False)
    try:
        return bool(opened.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.slow
async def test_silent_http_connections_stop_neither_front_end(model_folder: Path) -> None:
    async with router(model_folder) as (http, address), httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        with contextlib.ExitStack() as stack:
            sockets = await asyncio.to_thread(flood, stack, http, b"")
            sockets += await asyncio.to_thread(flood, stack, http, b"GET /health HTTP/1.1\r\nHost: x\r\n")
            for _ in range(3):
                async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as another:
                    assert (await another.get(f"http://{http}/health")).status_code == 503  # no worker
                assert await get_model(address, HANG_S) == model_folder.name
            assert (await client.get(f"http://{http}/live")).status_code == 200
            async with asyncio.timeout(10 * SILENT_S):
                while sum(map(is_open, sockets)):  # noqa: ASYNC110 - the other side tells no event
                    await asyncio.sleep(0.5)
            assert (await client.get(f"http://{http}/live")).status_code == 200


@pytest.mark.slow
async def test_silent_grpc_connections_stop_neither_front_end(model_folder: Path) -> None:
    async with router(model_folder) as (http, address), httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        with contextlib.ExitStack() as stack:
            sockets = await asyncio.to_thread(flood, stack, address, b"")
            sockets += await asyncio.to_thread(flood, stack, address, b"PRI * HTTP/2.0\r\n\r\n")
            assert (await client.get(f"http://{http}/live")).status_code == 200
            # new ones are closed at once until those have had their time
            async with asyncio.timeout(6 * HANDSHAKE_S):
                while True:
                    try:
                        assert await get_model(address, 5) == model_folder.name
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.2)
                while sum(map(is_open, sockets)):  # noqa: ASYNC110 - the other side tells no event
                    await asyncio.sleep(0.5)
            assert await get_model(address, HANG_S) == model_folder.name
