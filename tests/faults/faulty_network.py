"""Links between processes that refuse, reset, fall silent, crawl and turn bits over when told to.

A worker listens on one loopback address and is told to others under another, on the same ports: there a `Link` forwards.
Routers are given a third, so that a worker can be lost to its router, to its peers, or to both.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Sequence

WORKER_HOST = "127.0.0.1"
"""Workers listen here."""
PEERS_HOST = "127.0.0.2"
"""Other workers find them here."""
ROUTER_HOST = "127.0.0.3"
"""Routers find them here."""
_PORTS = range(15_000, 30_000)
"""Below those that outgoing connections draw: a worker must get its port again after a restart."""
_CHUNK_BYTES = 16_384


class Link:
    """Listens on host:port and forwards each connection to the same port of the worker. Lives in the test's event loop."""

    def __init__(self, host: str, port: int, draw: random.Random) -> None:
        self.host, self.port = host, port
        self._draw = draw
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._opens = {True: asyncio.Event(), False: asyncio.Event()}
        """For what comes from the worker, and what goes to it."""
        self._bytes_per_s: float | None = None
        self._bytes_to_reset: int | None = None
        self._bytes_to_flip: int | None = None
        self._flip_every = 0
        for opened in self._opens.values():
            opened.set()

    async def listen(self) -> None:
        """Raises: OSError when the port is taken."""
        self._server = await asyncio.start_server(self._connected, self.host, self.port, limit=_CHUNK_BYTES)

    async def close(self) -> None:
        self.refuse()
        while self._pairs:
            await asyncio.wait(list(self._pairs))

    def reset(self) -> None:
        """Every connection that there is."""
        for task, writers in self._pairs.items():
            for writer in writers:
                _reset(writer)
            task.cancel()

    def refuse(self) -> None:
        """Reset every connection, and listen no more until `mend`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()

    def be_silent(self, *ways: bool) -> None:
        """Take connections and bytes, and forward none; what was kept goes on with `mend`.

        ways: True for what comes from the worker, False for what goes to it; default: both.
        """
        for way in ways or self._opens:
            self._opens[way].clear()

    def slow_to(self, bytes_per_s: float) -> None:
        """Forward no faster on each connection."""
        self._bytes_per_s = bytes_per_s

    def reset_after(self, num_bytes: int) -> None:
        """Once: reset the connection that has the last of so many more bytes, in the middle of what it forwards."""
        self._bytes_to_reset = num_bytes

    def flip_after(self, num_bytes: int) -> None:
        """Turn one bit over after so many more bytes from the worker, again and again."""
        self._bytes_to_flip = self._flip_every = num_bytes

    async def mend(self) -> None:
        """No fault from here on."""
        self._bytes_per_s = self._bytes_to_reset = self._bytes_to_flip = None
        for opened in self._opens.values():
            opened.set()
        if self._server is None:
            await self.listen()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs[task] = (writer,)
        try:
            far_reader, far_writer = await asyncio.open_connection(WORKER_HOST, self.port, limit=_CHUNK_BYTES)
            self._pairs[task] = (writer, far_writer)
            ways = [
                asyncio.create_task(self._carry(reader, far_writer, is_from_worker=False)),
                asyncio.create_task(self._carry(far_reader, writer, is_from_worker=True)),
            ]
            try:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in done:
                    way.result()
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            for each in self._pairs[task]:
                _reset(each)
        finally:
            for each in self._pairs.pop(task):
                each.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_from_worker: bool) -> None:
        """To the end of what comes. Raises: OSError."""
        while chunk := await reader.read(_CHUNK_BYTES):
            await self._opens[is_from_worker].wait()
            if self._bytes_per_s is not None:
                await asyncio.sleep(len(chunk) / self._bytes_per_s)
            if self._bytes_to_reset is not None:
                self._bytes_to_reset -= len(chunk)
                if self._bytes_to_reset <= 0:
                    self._bytes_to_reset = None
                    writer.write(chunk[: len(chunk) // 2])
                    raise ConnectionResetError("as it was told to")
            writer.write(self._spoil(chunk) if is_from_worker else chunk)
            await writer.drain()
        await self._opens[is_from_worker].wait()

    def _spoil(self, chunk: bytes) -> bytes:
        if self._bytes_to_flip is None:
            return chunk
        self._bytes_to_flip -= len(chunk)
        if self._bytes_to_flip > 0:
            return chunk
        self._bytes_to_flip = self._flip_every
        spoilt = bytearray(chunk)
        spoilt[self._draw.randrange(len(spoilt))] ^= 1 << self._draw.randrange(8)
        return bytes(spoilt)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def free_ports(num_ports: int, hosts: Sequence[str], draw: random.Random) -> list[int]:
    """Ports on which nobody listens at any of these addresses."""
    free: list[int] = []
    while len(free) < num_ports:
        port = draw.choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for host in hosts:
                probes.enter_context(socket.create_server((host, port)))
            if port not in free:
                free.append(port)
    return free
