"""How fast blocks move between two processes of this machine: NIXL (where it is installed), TCP with TLS and without it,
and a bare socket.

    python benchmarks/transfer.py [--rounds 30]

Each round reads the same blocks over each of them in turn, so that they share the machine's mood; medians are printed.
The connectors digest every block; the bare socket receives bytes in one `recv_into` loop and does nothing else. Blocks
lie in order, or (`scattered`) in random places on both sides, as in a pool that has been in use for a while.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trustme
from conditions import conditions

from pdserve.common.errors import TransferFailed
from pdserve.common.tls import TlsFile, TlsIdentity, load_identity
from pdserve.kv_transfer.connector import BlockConnector, BlockToRead, PoolMemory, ReadOutcome
from pdserve.kv_transfer.digest import block_digests
from pdserve.kv_transfer.nixl import NixlConnector
from pdserve.kv_transfer.nixl_agent import why_no_nixl
from pdserve.kv_transfer.tcp import TcpConnector
from pdserve.kv_transfer.tcp_settings import TcpSettings

POOL_BYTES = 64 << 20
BLOCK_SIZES = (32 << 10, 1 << 20)
BLOCK_COUNTS = (1, 4, 16, 64)
TOKEN = bytes(range(16))
SIZE_BYTES = 8
FILES = ("cert.pem", "key.pem", "ca.pem")


def make_pool(block_bytes: int) -> PoolMemory:
    content = bytearray(b"0123456789abcdef" * (POOL_BYTES // 16))
    # Every page is there, and no two blocks are alike.
    for number in range(POOL_BYTES // 4096):
        content[number * 4096 : number * 4096 + 8] = number.to_bytes(SIZE_BYTES, "big")
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


def make_connectors(folder: Path) -> dict[str, BlockConnector]:
    """By the name of their row. folder: the files of `issue`."""
    connectors: dict[str, BlockConnector] = {} if why_no_nixl() else {"nixl": NixlConnector()}
    return connectors | {"tcp": TcpConnector(), "tcp with tls": TcpConnector(TcpSettings(tls=identity(folder)))}


def issue(folder: Path) -> None:
    """A certificate for 127.0.0.1, its key and its CA."""
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    for name, blob in zip(FILES, (issued.cert_chain_pems[0], issued.private_key_pem, ca.cert_pem), strict=True):
        blob.write_to_path(folder / name)


def identity(folder: Path) -> TlsIdentity:
    certificate, key, ca = (TlsFile(name, str(folder / name)) for name in FILES)
    return load_identity(certificate, key, ca, server_name=None, own_host="127.0.0.1")


def serve(block_bytes: int, folder: Path) -> None:
    """The source process: prints the connectors' metadata and the bare socket's port, ends with its input."""
    pool = make_pool(block_bytes)
    connectors = make_connectors(folder)
    for connector in connectors.values():
        connector.serve(pool)
        connector.grant(TOKEN).publish(0, some_blocks(pool.num_blocks, seed=1))
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while frame := sock.recv(SIZE_BYTES, socket.MSG_WAITALL):
            sock.sendall(pool.view[: int.from_bytes(frame, "big")])

    threading.Thread(target=answer, daemon=True).start()
    print(*(connector.metadata.hex() for connector in connectors.values()), listener.getsockname()[1], flush=True)
    sys.stdin.read()
    for connector in connectors.values():
        connector.close()


def some_blocks(num_blocks: int, seed: int) -> list[int]:
    """Where index i lies: the first half of the indexes in order, the second half anywhere."""
    rest = list(range(num_blocks // 2, num_blocks))
    random.Random(seed).shuffle(rest)
    return [*range(num_blocks // 2), *rest]


def measure(block_bytes: int, rounds: int, folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", str(block_bytes), "--tls-files", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        *told, port = process.stdout.readline().split()
        pool = make_pool(block_bytes)
        locations, places = (some_blocks(pool.num_blocks, seed) for seed in (1, 2))
        digests = block_digests(pool, locations)
        connectors = make_connectors(folder)
        metadata = {name: bytes.fromhex(text) for name, text in zip(connectors, told, strict=True)}
        for connector in connectors.values():
            connector.serve(pool)
        bare = socket.create_connection(("127.0.0.1", int(port)))
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def over(name: str, first: int, count: int) -> None:
            arrival = Arrival()
            blocks = [BlockToRead(i, digests[i], places[i], locations[i]) for i in range(first, first + count)]
            connectors[name].read(metadata[name], TOKEN, blocks, arrival)
            arrival.wait()

        def over_bare_socket(count: int) -> None:
            size = count * block_bytes
            bare.sendall(size.to_bytes(SIZE_BYTES, "big"))
            received = 0
            while received < size:
                received += bare.recv_into(pool.view[received:size])

        for name in connectors:
            began = time.perf_counter()
            over(name, 0, 1)
            print(f"first read of a peer over {name}: {(time.perf_counter() - began) * 1e3:.1f} ms")
        for where, first in (("in order", 0), ("scattered", pool.num_blocks // 2)):
            for count in BLOCK_COUNTS:
                if first + count > pool.num_blocks:
                    continue
                ways: dict[str, Callable[[], None]] = {name: partial(over, name, first, count) for name in connectors}
                ways["bare socket"] = partial(over_bare_socket, count)
                size = count * block_bytes
                medians = interleaved(ways, rounds)
                shown = "   ".join(
                    f"{name} {size / t / 1e9:6.2f} GB/s {t * 1e6:8.0f} us" for name, t in medians.items()
                )
                print(f"{count:4d} x {block_bytes >> 10:5d} KiB {where:9s}   {shown}")
        bare.close()
        for connector in connectors.values():
            connector.close()


def interleaved(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, call in ways.items():
            began = time.perf_counter()
            call()
            if number >= 3:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(kept) for name, kept in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--serve", type=int, metavar="BLOCK_BYTES", help=argparse.SUPPRESS)
    parser.add_argument("--tls-files", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.tls_files)
        return
    print(", ".join(f"{name}: {value}" for name, value in conditions().items()))
    # As a worker does at its start: a transport thread leaves `recv` sooner while other threads run Python.
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory() as folder:
        issue(Path(folder))
        for block_bytes in BLOCK_SIZES:
            measure(block_bytes, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
