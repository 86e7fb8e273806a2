"""`HttpServer` and its connections: silent, slow and too many clients, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.net import http_connection, http_server
from pdserve.common.net.connection_gate import ConnectionGate, ConnectionLimits
from pdserve.common.net.http_server import HttpServer, listening_socket
from pdserve.common.security.tls import ServerTls, TlsFile, load_front
from tests.support.processes.tls_authority import Authority
from tests.support.run.waiting import HANG_S, eventually


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times a twentieth."""
    for name in ("HEADER_TIMEOUT_S", "BODY_WINDOW_S", "LINGER_S"):
        monkeypatch.setattr(http_connection, name, getattr(http_connection, name) / 20)
    monkeypatch.setattr(http_connection, "WRITE_STALL_S", 0.5)
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_server, "_LOOK_EVERY_S", 0.05)


class App:
    """/ answers at once, /read after the body, /refuse without reading it, /much with 8 MiB, /never not at all."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/", self.answer),
                Route("/read", self.read, methods=["POST"]),
                Route("/refuse", self.refuse, methods=["POST"]),
                Route("/much", self.much),
                Route("/never", self.never),
            ]
        )

    async def answer(self, request: Request) -> Response:
        return Response("ok")

    async def refuse(self, request: Request) -> Response:
        return Response("no", 401)

    async def much(self, request: Request) -> Response:
        return Response(b"x" * (8 << 20))

    async def never(self, request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def read(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect

        try:
            return Response(str(len(await request.body())))
        except ClientDisconnect:
            self.left.set()
            raise


class Served:
    """A server and where it listens."""

    def __init__(self, server: HttpServer, port: int, app: App) -> None:
        self.server, self.port, self.app = server, port, app
        self.url = f"http://127.0.0.1:{port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def serving(limits: ConnectionLimits | None = None, tls: ServerTls | None = None) -> AsyncIterator[Served]:
    app = App()
    server = HttpServer(app.app, 75, 1, tls, limits)
    bound = listening_socket("127.0.0.1", 0)
    port = bound.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[bound]))
    await server.listening.wait()
    try:
        yield Served(server, port, app)
    finally:
        server.stop()
        await task
    assert len(server.gate) == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the server closed the connection."""
    async with asyncio.timeout(HANG_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.few(1)
@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_without_a_whole_header_is_closed(quick: None, sent: bytes) -> None:
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(sent)
        assert await closed(reader) == b""
        writer.close()
        # also where a request came before
        reader, writer = await served.connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET")
        assert await closed(reader) == b""
        writer.close()
        await eventually(lambda: len(served.server.gate) == 0)


@pytest.mark.slow
async def test_a_connection_that_rests_between_requests_stays(quick: None) -> None:
    async with serving() as served:
        reader, writer = await served.connect()
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"ok")
            await asyncio.sleep(0.8)
        assert len(served.server.gate) == 1
        writer.close()


async def test_a_slow_body_is_cut_off(quick: None) -> None:
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 100_000)
        assert await closed(reader) == b""
        await asyncio.wait_for(served.app.left.wait(), HANG_S)
        writer.close()


async def test_a_steady_body_is_not_cut_off_until_it_slows(quick: None) -> None:
    """Time passes where the test says so: on a busy machine no client sends steadily."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_server, "_LOOK_EVERY_S", 10 * HANG_S)
        async with serving() as served:
            reader, writer = await served.connect()
            writer.write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n\r\n")
            connection: Any = await eventually(lambda: next(iter(served.server.server_state.connections), None))
            await eventually(lambda: connection.conn.their_state is h11.SEND_BODY)
            clock = asyncio.get_running_loop().time()
            connection.look(clock)

            async def send(num_bytes: int) -> None:
                """And let 0.1 s pass."""
                nonlocal clock
                received = connection._num_received + num_bytes
                writer.write(b"x" * num_bytes)
                await eventually(lambda: connection._num_received == received)
                clock += 0.1
                connection.look(clock)

            # four windows at twice the least rate
            for _ in range(20):
                await send(http_connection.MIN_BODY_BYTES_PER_S // 5)
            assert not connection.transport.is_closing()
            # one at half of it; another may have begun
            for _ in range(10):
                if not connection.transport.is_closing():
                    await send(http_connection.MIN_BODY_BYTES_PER_S // 20)
            assert await closed(reader) == b""
            await asyncio.wait_for(served.app.left.wait(), HANG_S)
            writer.close()


async def test_the_rest_of_a_refused_body_is_not_read_for_ever(quick: None) -> None:
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(b"POST /refuse HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401")
        hung_up = asyncio.create_task(closed(reader))
        with contextlib.suppress(ConnectionError):
            while not hung_up.done():
                writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
                await asyncio.sleep(0.02)
        assert await hung_up == b""
        writer.close()


async def test_a_client_that_never_reads_is_cut_off(quick: None) -> None:
    async with serving() as served:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
            await eventually(lambda: len(served.server.gate) == 1)
            await eventually(lambda: len(served.server.gate) == 0)


@pytest.mark.few(5)
@pytest.mark.parametrize("length", [b"Content-Length: 4", b"content-length: 0", b"CONTENT-LENGTH: 99999"])
@pytest.mark.parametrize("first", [True, False])
async def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(length: bytes, first: bool) -> None:
    """A proxy that reads the other one would take the rest for a request of another client."""
    lines = [length, b"Transfer-Encoding: chunked"]
    head = b"\r\n".join([b"POST /read HTTP/1.1", b"Host: x", *(lines if first else reversed(lines))])
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(head + b"\r\n\r\n4\r\nabcd\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await closed(reader)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in answer
        assert answer.endswith(b"both Content-Length and Transfer-Encoding, and one is allowed.")
        assert answer.count(b"HTTP/1.1") == 1


async def test_what_clients_can_cause_is_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    http_connection.CLIENT_FAULTS.forget()
    async with serving() as served:
        for sent in [b"no request\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", upgrade] * 20:
            reader, writer = await served.connect()
            writer.write(sent)
            assert await closed(reader)
            writer.close()
    assert [record.getMessage()[:27] for record in caplog.records] == [
        "Invalid HTTP request receiv", "Unsupported upgrade request", "No supported WebSocket libr"
    ]  # fmt: skip


async def test_a_stop_cuts_requests_off_in_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        clients = [await served.connect() for _ in range(3)]
        for _, writer in clients:
            writer.write(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: len(served.server.server_state.tasks) == 3)
    for reader, writer in clients:
        assert not (await closed(reader)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert [record.getMessage()[:24] for record in caplog.records] == ["Cancel 3 running task(s)"]
    assert "Traceback" not in caplog.text


async def test_silent_connections_keep_nobody_out() -> None:
    async with serving(ConnectionLimits(total=20, per_address=10)) as served:
        silent = [await served.connect() for _ in range(60)]
        await eventually(lambda: served.server.gate.num_refused == 50)
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
            for _ in range(3):
                assert (await client.get(served.url)).text == "ok"
        # those that came first were closed
        assert await closed(silent[0][0]) == b""
        for _, writer in silent:
            writer.close()


async def test_a_connection_with_a_request_is_not_closed_for_others() -> None:
    async with serving(ConnectionLimits(total=3, per_address=3)) as served:
        busy = [await served.connect() for _ in range(3)]
        for _, writer in busy:
            writer.write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
        await eventually(lambda: not served.server.gate._waiting)
        reader, writer = await served.connect()
        assert await closed(reader) == b""
        writer.close()
        for reader, writer in busy:
            writer.write(b"0123456789")
            assert (await reader.readuntil(b"\r\n\r\n10")).startswith(b"HTTP/1.1 200")
        # now they rest, and the one that has done so for longest leaves
        reader, writer = await served.connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"ok")
        assert await closed(busy[0][0]) == b""
        for _, each in [*busy, (reader, writer)]:
            each.close()


async def test_handshakes_count_and_end(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Authority(tmp_path / "ca").issue()
    named = files.settings()
    tls = load_front(
        TlsFile("certificate", str(named["tls_cert_file"])), TlsFile("key", str(named["tls_key_file"])), None
    )
    async with serving(ConnectionLimits(total=10, per_address=10), tls) as served:
        silent = [await served.connect() for _ in range(3)]
        for reader, writer in silent:
            assert await closed(reader) == b""
            writer.close()
        await eventually(lambda: len(served.server.gate) == 0)
        # none of these ends by its time while they are counted
        monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 10 * HANG_S)
        silent = [await served.connect() for _ in range(15)]
        await eventually(lambda: len(served.server.gate) == 10)
        await eventually(lambda: served.server.gate.num_refused == 5)
        context = ssl.create_default_context(cafile=str(named["tls_ca_file"]))
        async with httpx.AsyncClient(trust_env=False, verify=context, timeout=HANG_S) as client:
            assert (await client.get(f"https://127.0.0.1:{served.port}")).text == "ok"
        for _, writer in silent:
            writer.close()
        await eventually(lambda: len(served.server.gate) == 0)


ON_UVLOOP = (
    test_a_connection_that_rests_between_requests_stays,
    test_a_slow_body_is_cut_off,
    test_a_steady_body_is_not_cut_off_until_it_slows,
    test_the_rest_of_a_refused_body_is_not_read_for_ever,
    test_a_client_that_never_reads_is_cut_off,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("scenario", ON_UVLOOP)
def test_the_same_on_the_loop_of_services(quick: None, scenario: Callable[[None], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario(None))


def test_handshakes_on_the_loop_of_services(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_handshakes_count_and_end(None, tmp_path, monkeypatch))
        runner.run(test_silent_connections_keep_nobody_out())


def test_each_address_has_its_share() -> None:
    gate = ConnectionGate(ConnectionLimits(total=6, per_address=3))
    ended: list[str] = []
    for host in ("10.0.0.1",) * 5 + ("10.0.0.2",) * 2:
        place = gate.enter(host)
        assert place is not None
        place.end = lambda host=host: ended.append(host)  # type: ignore[misc]
    assert ended == ["10.0.0.1"] * 2
    assert len(gate) == 5
    others = [gate.enter(f"10.0.1.{number}") for number in range(4)]
    assert ended == ["10.0.0.1"] * 5
    for place in others:
        assert place is not None
        place.serves()
        place.leave()
        place.leave()
    assert len(gate) == 2


def test_a_network_is_forgotten_with_its_last_connection() -> None:
    gate = ConnectionGate(ConnectionLimits(total=2, per_address=1))
    for number in range(100):
        place = gate.enter(f"2001:db8:0:{number:x}::1")
        assert place is not None
        place.serves()
        assert gate.enter(f"2001:db8:0:{number:x}::2") is None
        place.leave()
    assert not gate._by_network
    assert not gate._waiting_of
