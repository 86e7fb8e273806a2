"""How fast the TCP connector moves blocks between two processes on loopback, against a bare socket in the same run.

    python benchmarks/tcp_connector.py [--rounds 30]

The bare socket receives the same bytes in one `recv_into` loop, with no request, digest or call-back. Rounds of both are
interleaved, so that they share the machine's mood; medians are printed, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead, PoolMemory, ReadOutcome
from pdserve.kv_transfer.digest import block_digests
from pdserve.kv_transfer.tcp import TcpConnector

POOL_BYTES = 64 << 20
BLOCK_SIZES = (32 << 10, 1 << 20)
BLOCK_COUNTS = (1, 4, 16, 64)
TOKEN = bytes(range(16))
_SIZE = struct.Struct("!Q")


def make_pool(block_bytes: int) -> PoolMemory:
    content = bytearray(b"0123456789abcdef" * (POOL_BYTES // 16))
    # Every page is there, and no two blocks are alike.
    for number in range(POOL_BYTES // 4096):
        content[number * 4096 : number * 4096 + 8] = _SIZE.pack(number)
    return PoolMemory(memoryview(content), block_bytes, POOL_BYTES // block_bytes)


class Arrival:
    """A `ReadListener` that waits for the end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._outcome: tuple[ReadOutcome, TransferFailed | None] | None = None

    def landed(self, first: int, count: int) -> None:
        """Only the end counts."""

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self._outcome = (outcome, cause)
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._outcome != (ReadOutcome.DONE, None):
            raise SystemExit(f"a read ended with {self._outcome}")


def serve(block_bytes: int) -> None:
    """The source process: prints the connector's metadata and the bare socket's port, ends with its input."""
    pool = make_pool(block_bytes)
    connector = TcpConnector()
    connector.serve(pool)
    connector.grant(TOKEN).publish(0, range(pool.num_blocks))
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while frame := sock.recv(_SIZE.size, socket.MSG_WAITALL):
            sock.sendall(pool.view[: _SIZE.unpack(frame)[0]])

    threading.Thread(target=answer, daemon=True).start()
    print(connector.metadata.decode(), listener.getsockname()[1], flush=True)
    sys.stdin.read()
    connector.close()


def measure(block_bytes: int, rounds: int) -> None:
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", str(block_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        metadata, port = process.stdout.readline().split()
        pool = make_pool(block_bytes)
        digests = block_digests(pool, range(pool.num_blocks))
        receiver = TcpConnector()
        receiver.serve(pool)
        bare = socket.create_connection(("127.0.0.1", int(port)))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def over_connector(count: int) -> None:
            arrival = Arrival()
            blocks = [BlockToRead(index, digests[index], index) for index in range(count)]
            receiver.read(metadata.encode(), TOKEN, blocks, arrival)
            arrival.wait()

        def over_bare_socket(count: int) -> None:
            size = count * block_bytes
            bare.sendall(_SIZE.pack(size))
            received = 0
            while received < size:
                received += bare.recv_into(pool.view[received:size])

        for count in BLOCK_COUNTS:
            ours, bares = interleaved(partial(over_connector, count), partial(over_bare_socket, count), rounds)
            size = count * block_bytes
            print(
                f"{count:4d} x {block_bytes >> 10:5d} KiB   connector {size / ours / 1e9:6.2f} GB/s {ours * 1e6:9.0f} us"
                f"   bare socket {size / bares / 1e9:6.2f} GB/s {bares * 1e6:9.0f} us   rate {bares / ours:5.0%}"
            )
        bare.close()
        receiver.close()


def interleaved(first: Callable[[], None], second: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Medians of both, in seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 3):
        for call, kept in zip((first, second), times, strict=True):
            began = time.perf_counter()
            call()
            if number >= 3:
                kept.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--serve", type=int, metavar="BLOCK_BYTES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    # As a worker does at its start: a transport thread leaves `recv` sooner while other threads run Python.
    sys.setswitchinterval(0.0005)
    for block_bytes in BLOCK_SIZES:
        measure(block_bytes, arguments.rounds)


if __name__ == "__main__":
    main()
