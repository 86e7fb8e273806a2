"""How fast blocks move between two processes of this machine, by connector, block size and request size, beside the same
bytes moved without a connector: copied within a process, from bare sockets, by NIXL alone.

    python benchmarks/transfer.py [--rounds 30] [--tls] [--json FILE]

Each round moves the same bytes each way in turn, so that all share the machine's mood; medians are printed in GB/s, with
the ratio to the best bare socket for `tcp` and to raw NIXL for `nixl` (where it is installed). Blocks lie in order, or
(`scattered`) anywhere on both sides, as in a pool that has been in use for a while; bare sockets know no blocks, and get
theirs always in order.

pdserve verifies every block. Only here, for comparison, the check is taken out of the threads that read (`unverified`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import trustme
from conditions import conditions
from raw_reads import BareSockets, Memcpy, RawNixl, SocketSource

from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import KEY_BYTES, XXH3, BlockDigest, Gmac
from pdserve.common.security.tls import TlsFile, TlsIdentity, load_identity
from pdserve.kv_transfer.connector import BlockConnector, BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl
from pdserve.kv_transfer.pull import peer_connections
from pdserve.kv_transfer.pull.digest import block_digests
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings

POOL_BYTES = 256 << 20
BLOCK_SIZES = (32 << 10, 256 << 10, 1 << 20)
REQUEST_SIZES = (32 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
WARM_UP_ROUNDS = 2
ROUND_BYTES = 4 << 30
"""Most bytes of one way in all rounds together; `FEWEST_ROUNDS` are run in any case."""
FEWEST_ROUNDS = 7
ORDERS = ("in order", "scattered")
FILES = ("cert.pem", "key.pem", "ca.pem")
GMAC = Gmac(bytes(KEY_BYTES))
Way = Callable[[], None]


def make_pool(block_bytes: int) -> HostPool:
    content = np.arange(POOL_BYTES // 8, dtype=np.uint64)  # every page is there, and no two blocks are alike
    return HostPool(content.data.cast("B"), block_bytes, POOL_BYTES // block_bytes)


def places(num_blocks: int, order: str, seed: int) -> list[int]:
    """The block of each index."""
    blocks = list(range(num_blocks))
    if order == "scattered":
        random.Random(seed).shuffle(blocks)
    return blocks


def token(order: str) -> bytes:
    return order.encode().ljust(16)


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


def make_connectors(folder: Path, with_tls: bool) -> dict[str, BlockConnector]:
    """Connectors by the name of their column. folder: the files of `issue`."""
    connectors: dict[str, BlockConnector] = {"tcp": TcpConnector()}
    if with_tls:
        connectors["tcp with tls"] = TcpConnector(TcpSettings(tls=identity(folder)))
    return connectors if why_no_nixl() else connectors | {"nixl": NixlConnector()}


def issue(folder: Path) -> None:
    """A certificate for 127.0.0.1, its key and its CA."""
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    for name, blob in zip(FILES, (issued.cert_chain_pems[0], issued.private_key_pem, ca.cert_pem), strict=True):
        blob.write_to_path(folder / name)


def identity(folder: Path) -> TlsIdentity:
    certificate, key, ca = (TlsFile(name, str(folder / name)) for name in FILES)
    return load_identity(certificate, key, ca, server_name=None, own_host="127.0.0.1")


def serve(block_bytes: int, folder: Path, with_tls: bool) -> None:
    """The source process: prints the connectors' metadata and the bare sockets' port, ends with its input."""
    pool = make_pool(block_bytes)
    connectors = make_connectors(folder, with_tls)
    for connector in connectors.values():
        connector.serve(pool)
        for order in ORDERS:
            connector.grant(token(order)).publish(0, places(pool.num_blocks, order, seed=1))
    print(*(connector.metadata.hex() for connector in connectors.values()), SocketSource(pool).port, flush=True)
    sys.stdin.read()
    for connector in connectors.values():
        connector.close()


@contextmanager
def unverified() -> Iterator[None]:
    """Readers take every block for the right one. pdserve has no such setting, and must not."""
    with mock.patch.object(peer_connections, "matching", lambda pool, blocks, digest: [True] * len(blocks)):
        yield


class Receiver:
    """The receiving process's side of every way, for one block size."""

    def __init__(self, block_bytes: int, folder: Path, with_tls: bool, told: list[str], exits: ExitStack) -> None:
        """told: what the source printed."""
        self._pool = pool = make_pool(block_bytes)
        self._connectors = make_connectors(folder, with_tls)
        *metadata, port = told
        self._metadata = {n: bytes.fromhex(text) for n, text in zip(self._connectors, metadata, strict=True)}
        for connector in self._connectors.values():
            connector.serve(pool)
            exits.callback(connector.close)
        self._memcpy = Memcpy(pool)
        self._sockets = {
            "socket": BareSockets(pool, int(port), 1),
            "2 sockets": BareSockets(pool, int(port), 2),
        }
        for sockets in self._sockets.values():
            exits.callback(sockets.close)
        self._raw_nixl = RawNixl(pool, self._metadata["nixl"]) if "nixl" in self._connectors else None
        if self._raw_nixl:
            exits.callback(self._raw_nixl.close)
        self._digests = block_digests(pool, range(pool.num_blocks))

    def ways(self, count: int, order: str) -> dict[str, Way]:
        """Each moves `count` blocks."""
        remote, local = (places(self._pool.num_blocks, order, seed)[:count] for seed in (1, 2))
        blocks = [
            BlockToRead(i, self._digests[r], own, r) for i, (r, own) in enumerate(zip(remote, local, strict=True))
        ]
        ways: dict[str, Way] = {"memcpy": partial(self._memcpy.read, local, remote)}
        for name, sockets in self._sockets.items():
            ways[name] = partial(sockets.read, count * self._pool.block_bytes)
        for name in self._connectors:
            if name == "nixl" and self._raw_nixl:
                numbers = (np.asarray(local, np.int32), np.asarray(remote, np.int32))
                ways["raw nixl"] = partial(self._raw_nixl.read, *numbers)
            ways[name] = partial(self._over, name, token(order), blocks)
            if name != "tcp with tls":
                ways[f"{name} unverified"] = partial(self._over_unverified, name, token(order), blocks)
        content = make_pool(self._pool.block_bytes)  # this side's own has been read into
        signed = [replace(block, digest=GMAC.of(content.block(block.location), block.index)) for block in blocks]
        ways["tcp with gmac"] = partial(self._over, "tcp", token(order), signed, GMAC)
        return ways

    def _over(self, name: str, token: bytes, blocks: list[BlockToRead], digest: BlockDigest = XXH3) -> None:
        arrival = Arrival()
        self._connectors[name].read(ReadOrder(self._metadata[name], token, blocks, digest), arrival)
        arrival.wait()

    def _over_unverified(self, name: str, token: bytes, blocks: list[BlockToRead]) -> None:
        with unverified():
            self._over(name, token, blocks)


def interleaved(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """The times of each, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, call in ways.items():
            began = time.perf_counter()
            call()
            if number >= WARM_UP_ROUNDS:
                times[name].append(round(time.perf_counter() - began, 6))
    return times


def shown(times: dict[str, list[float]], size: int) -> str:
    """A column for each way."""
    rates = {name: size / statistics.median(kept) / 1e9 for name, kept in times.items()}
    raw = {"tcp": max(rate for name, rate in rates.items() if "socket" in name), "nixl": rates.get("raw nixl", 0.0)}
    columns = []
    for name, rate in rates.items():
        base = raw.get(name.split()[0])
        columns.append(f"{rate:6.2f} ({rate / base:4.2f})" if base else f"{rate:6.2f}")
    return "  ".join(f"{column:>{column_width(name)}}" for name, column in zip(rates, columns, strict=True))


def column_width(name: str) -> int:
    return max(len(name), 13 if name.split()[0] in ("tcp", "nixl") else 6)


def measure(block_bytes: int, arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    command = [sys.executable, __file__, "--serve", str(block_bytes), "--tls-files", str(folder)]
    with (
        subprocess.Popen(
            [*command, *(["--tls"] if arguments.tls else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as exits,
    ):
        assert process.stdout is not None
        receiver = Receiver(block_bytes, folder, arguments.tls, process.stdout.readline().split(), exits)
        for number, size in enumerate(size for size in REQUEST_SIZES if size >= block_bytes):
            for order in ORDERS:
                ways = receiver.ways(size // block_bytes, order)
                if number == 0 and order == ORDERS[0]:
                    print(f"{'GB/s':29s}", *(f"{name:>{column_width(name)}}" for name in ways), sep="  ")
                rounds = min(arguments.rounds, max(FEWEST_ROUNDS, ROUND_BYTES // size))
                times = interleaved(ways, rounds)
                head = f"{block_bytes >> 10:4d} KiB x {size // block_bytes:4d} {order:10s}"
                print(f"{head:29s}", shown(times, size), sep="  ", flush=True)
                yield {"block_bytes": block_bytes, "request_bytes": size, "order": order, "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="at most; fewer where requests are large")
    parser.add_argument("--tls", action="store_true", help="also TCP with TLS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time to this file")
    parser.add_argument("--serve", type=int, metavar="BLOCK_BYTES", help=argparse.SUPPRESS)
    parser.add_argument("--tls-files", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.tls_files, arguments.tls)
        return
    where = conditions()
    print(", ".join(f"{name}: {value}" for name, value in where.items()))
    # As a worker does at its start: a transport thread leaves `recv` sooner while other threads run Python.
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory() as folder:
        issue(Path(folder))
        rows = [row for size in BLOCK_SIZES for row in measure(size, arguments, Path(folder))]
    if arguments.json:
        arguments.json.write_text(json.dumps({"conditions": where, "rows": rows}))


if __name__ == "__main__":
    main()
