"""Moves the same bytes without a connector, for comparison: copies within a process, a plain socket, and NIXL alone.

These have no digests, no fairness among readers, no detection of stalls, and no permissions.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl_agent import ReadStatus, UcxAgent
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer
from pdserve.kv_transfer.nixl.nixl_settings import NixlAddress

SIZE_BYTES = 8
_CONNECT_S = 10.0


class Memcpy:
    """Copies blocks of one pool into another of this process, a run of neighbours at once."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._origin = HostPool(memoryview(bytearray(pool.view)), pool.block_bytes, pool.num_blocks)

    def read(self, local: Sequence[int], remote: Sequence[int]) -> None:
        if local == remote:  # then both sides have the same runs, most often one
            for to, origin in zip(self._pool.views(local), self._origin.views(remote), strict=True):
                to[:] = origin
            return
        for number, other in zip(local, remote, strict=True):
            self._pool.block(number)[:] = self._origin.block(other)


class SocketSource:
    """Sends as many bytes of its pool as it is asked for, from an offset on; a thread for each connection."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while frame := sock.recv(2 * SIZE_BYTES, socket.MSG_WAITALL):
            offset, size = (int.from_bytes(frame[at : at + SIZE_BYTES], "big") for at in (0, SIZE_BYTES))
            sock.sendall(self._pool.view[offset : offset + size])


class BareSockets:
    """Receives from a `SocketSource` over `count` sockets, each with its thread and an equal part of the bytes."""

    def __init__(self, pool: HostPool, port: int, count: int) -> None:
        self._pool = pool
        self._socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = ThreadPoolExecutor(count)

    def read(self, num_bytes: int) -> None:
        """The first bytes of the source's pool into the first of this one."""
        part = num_bytes // len(self._socks)
        others = [
            self._threads.submit(self._receive, sock, n * part, part) for n, sock in enumerate(self._socks[1:], 1)
        ]
        self._receive(self._socks[0], 0, part)
        for other in others:
            other.result()

    def _receive(self, sock: socket.socket, offset: int, size: int) -> None:
        sock.sendall(offset.to_bytes(SIZE_BYTES, "big") + size.to_bytes(SIZE_BYTES, "big"))
        end = offset + size
        while offset < end:
            offset += sock.recv_into(self._pool.view[offset:end])

    def close(self) -> None:
        self._threads.shutdown()
        for sock in self._socks:
            sock.close()


class RawNixl:
    """One agent, one prepared list of all blocks, one posted read of those that are wanted, polled without a pause."""

    def __init__(self, pool: HostPool, metadata: bytes) -> None:
        """metadata: of the source's `NixlConnector`."""
        self._peer = NixlPeer(pool, UcxAgent)
        self._peer.connect(NixlAddress.from_metadata(metadata), _CONNECT_S, pool.block_bytes)

    def read(self, local: np.ndarray, remote: np.ndarray) -> None:
        """local, remote: block numbers `[n]`, int32, so that nothing is left to convert."""
        read = self._peer.read(local, remote)  # type: ignore[arg-type]
        while (status := read.status()) is ReadStatus.UNDER_WAY:
            pass
        if status is not ReadStatus.DONE:
            raise SystemExit("a raw read over NIXL failed")
        read.release()

    def close(self) -> None:
        self._peer.destroy(threading.Event(), _CONNECT_S)
