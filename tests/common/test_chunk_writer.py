"""Parts of a response that leave without ASGI's `send`: the bytes are those of `send`, and none leaves where it must not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import h11
import pytest

from pdserve.common.net.chunk_writer import ChunkWriter, chunk_writer
from pdserve.common.net.http_server import HttpServer, listening_socket
from tests.support.run.waiting import HANG_S, eventually

PARTS = [b"a", b"", b"bc" * 3000, b"\r\n0\r\n\r\n", b"d"]


class App:
    """Streams `PARTS` by the writer where it is ready, else by `send`. Notes if it was ready first, after the head, and last."""

    def __init__(self) -> None:
        self.ready: list[bool] = []
        self.by_send: list[bytes] = []
        self.writer: ChunkWriter | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writer = self.writer = chunk_writer(scope)
        assert writer is not None
        self.ready = [writer.is_ready]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.ready.append(writer.is_ready)
        for part in PARTS:
            if writer.is_ready:
                writer.write(part)
            else:
                self.by_send.append(part)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"end"})
        self.ready.append(writer.is_ready)


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    """The port."""
    server = HttpServer(app, 75, 1)
    bound = listening_socket("127.0.0.1", 0)
    port: int = bound.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[bound]))
    await server.listening.wait()
    try:
        yield port
    finally:
        app.may_end.set()
        server.stop()
        await task


async def body_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, version: str) -> bytes:
    """The body of an answer on an open connection, as a client of h11 reads it."""
    writer.write(f"{method} / HTTP/{version}\r\nhost: x\r\n\r\n".encode())
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    body = b""
    async with asyncio.timeout(HANG_S):
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Data):
                body += event.data
    return body


async def test_a_client_reads_what_send_would_have_written_twice_on_one_connection() -> None:
    app = App()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            assert await body_of(reader, writer, "GET", "1.1") == b"".join(PARTS) + b"end"
            assert app.ready == [False, True, False]
        writer.close()
    assert not app.by_send


@pytest.mark.parametrize(
    ("method", "version", "body"), [("GET", "1.0", b"".join(PARTS) + b"end"), ("HEAD", "1.1", b"")]
)
async def test_a_response_that_is_not_sent_in_chunks_is_left_to_send(method: str, version: str, body: bytes) -> None:
    app = App()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await body_of(reader, writer, method, version) == body
        writer.close()
    assert app.ready == [False, False, False]
    assert app.by_send == PARTS


async def test_nothing_is_written_to_a_client_that_does_not_read_or_has_left() -> None:
    app = App()
    app.may_end.clear()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"d\r\n")
        chunks = app.writer
        assert chunks is not None
        assert chunks.is_ready
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
        while chunks.is_ready:
            chunks.write(b"x" * (1 << 16))
            await asyncio.sleep(0)
        writer.transport.resume_reading()
        reading = asyncio.create_task(reader.read(-1))
        await eventually(lambda: chunks.is_ready)
        writer.transport.abort()
        await eventually(lambda: not chunks.is_ready)
        await asyncio.gather(reading, return_exceptions=True)
