"""Keepalive on real processes: a silent peer is noticed within 5 s; one that idles or is briefly suspended is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import grpc
import pytest

from pdserve.common.net.rpc import PING_EVERY_MS, PING_TIMEOUT_MS, bind, make_channel, make_server
from tests.support.processes.tls_authority import Authority
from tests.support.run.waiting import HANG_S

PEER = Path(__file__).with_name("idle_peer.py")
_spec = spec_from_file_location("idle_peer", PEER)
assert _spec is not None
assert _spec.loader is not None
idle_peer = module_from_spec(_spec)
_spec.loader.exec_module(idle_peer)

LIMIT_S = 10.0
"""Twice what the protocol promises."""
SUSPENDED_S = PING_TIMEOUT_MS / 2000
"""Half of what a peer may take to answer a ping, and more than the time between pings: one falls into it."""


@contextlib.asynccontextmanager
async def peer(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PEER), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), HANG_S)).decode().strip()


@pytest.mark.few(1)
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_i6_a_silent_server_ends_the_clients_stream_within_five_seconds(with_tls: bool, tmp_path: Path) -> None:
    files = Authority(tmp_path / "ca").issue()
    told, tls = (files.settings().values(), files.identity().client) if with_tls else ((), None)
    async with peer("server", *told) as process, make_channel(f"127.0.0.1:{await line(process)}", tls) as channel:
        call = idle_peer.call(channel)
        assert await call.read() == b"hello"
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - stopped < LIMIT_S
        assert time.monotonic() - stopped > 0.5, "it ended for another reason"


async def test_i6_a_silent_client_ends_the_servers_handler_within_five_seconds() -> None:
    handler, server = idle_peer.IdleHandler(), make_server()
    server.add_generic_rpc_handlers((handler,))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with peer("client", str(port)) as process:
            assert await line(process) == "heard"
            process.send_signal(signal.SIGSTOP)
            await asyncio.wait_for(handler.ended.wait(), LIMIT_S)
    finally:
        await server.stop(None)


async def test_a_peer_that_is_suspended_for_a_moment_keeps_its_stream() -> None:
    async with peer("server") as process, make_channel(f"127.0.0.1:{await line(process)}") as channel:
        call = idle_peer.call(channel)
        assert await call.read() == b"hello"
        reading = asyncio.ensure_future(call.read())
        process.send_signal(signal.SIGSTOP)
        await asyncio.wait({reading}, timeout=SUSPENDED_S)
        process.send_signal(signal.SIGCONT)
        # one that was not answered would be over by now
        done, _ = await asyncio.wait({reading}, timeout=(PING_EVERY_MS + PING_TIMEOUT_MS) / 1000 - SUSPENDED_S + 0.5)
        assert not done
        assert not call.done()
        call.cancel()
        await asyncio.wait({reading})


@pytest.mark.slow
async def test_healthy_streams_may_idle_for_longer_than_any_timeout() -> None:
    async with peer("server") as process, make_channel(f"127.0.0.1:{await line(process)}") as channel:
        call = idle_peer.call(channel)
        assert await call.read() == b"hello"
        done, _ = await asyncio.wait({asyncio.ensure_future(call.read())}, timeout=8.5)
        assert not done
        assert not call.done()
        call.cancel()
        for read in asyncio.all_tasks() - {asyncio.current_task()}:
            read.cancel()
