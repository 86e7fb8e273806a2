"""Clients that send and never read, at every port of router and workers: memory stays flat and comes back, and others are served.

Each test prints the memory of every process before, at its peak, and after the clients have left.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service, pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.unread_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    OPENING,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
    unread,
)
from tests.support.run.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

MAY_PEAK_BYTES = 64 << 20
MAY_KEEP_BYTES = 8 << 20
GRPC_PORTS = ("router", "prefill", "decode")
CALLS = {
    "router": "/pdserve.v1.InferenceService/Generate",
    "prefill": "/pdserve.v1.StepStreamService/Open",
    "decode": "/pdserve.v1.StepStreamService/Open",
}
WORKER_DROPS_S, ROUTER_DROPS_S = 5.0, 20.0
"""Promised limits for a connection whose client reads nothing."""


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype=float32", "--num-blocks=64")
    with pd_cluster(tmp_path_factory.mktemp("unread"), model, both=flags) as cluster:
        # what a first flood leaves: threads of gRPC, with an arena each
        for port in GRPC_PORTS:
            with unread(cluster.services[port].address, [OPENING + calls(CALLS[port], 50)] * 10):
                time.sleep(1.0)
        yield cluster
        cluster.check_pools()
        cluster.check_logs()


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(autouse=True)
async def others_are_served(cluster: Cluster, oracle: Oracle) -> AsyncIterator[None]:
    """Before a test, so that what a first request allocates is there, and after it."""
    await ask(cluster, oracle)
    yield
    await ask(cluster, oracle)


async def ask(cluster: Cluster, oracle: Oracle) -> None:
    prompt = prompt_of(40, 1)
    async with InferenceClient(cluster.router.address) as client:
        oracle.check(prompt, (await client.ask(prompt, max_tokens=5)).token_ids)


def resident(service: Service) -> int:
    return int(psutil.Process(service.process.pid).memory_info().rss)


class Memory:
    """Memory of each process of a cluster, sampled every 10 ms."""

    def __init__(self, cluster: Cluster) -> None:
        self._services = list(cluster.services.values())
        self.before = self._now()
        self.peak = dict(self.before)
        self._over = threading.Event()
        self._sampling = threading.Thread(target=self._sample)

    def _now(self) -> dict[str, int]:
        return {service.name: resident(service) for service in self._services}

    def _sample(self) -> None:
        while not self._over.wait(0.01):
            self.peak = {name: max(now, self.peak[name]) for name, now in self._now().items()}

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """Hold the bounds for the block; clients have left at its end."""
        self._sampling.start()
        try:
            yield
        finally:
            self._over.set()
            self._sampling.join()
        after = self.before

        def is_back() -> bool:
            nonlocal after
            after = self._now()
            return all(now < self.before[name] + MAY_KEEP_BYTES for name, now in after.items())

        try:
            wait_until(is_back, lambda: f"{what}: {self._table(after)}")
        finally:
            print(f"\n{what}: {self._table(after)}")
        for name, peak in self.peak.items():
            assert peak < self.before[name] + MAY_PEAK_BYTES, f"{what}: {self._table(after)}"

    def _table(self, after: dict[str, int]) -> str:
        return ", ".join(
            f"{name} {self.before[name] / 2**20:.0f} / {self.peak[name] / 2**20:.0f} / {now / 2**20:.0f} MiB"
            for name, now in after.items()
        )


def call(path: str, stream: int, flags: int = END_HEADERS | END_STREAM) -> bytes:
    return frame(HEADERS, flags, stream, header_block(path))


def calls(path: str, count: int, flags: int = END_HEADERS | END_STREAM, end: bytes = b"") -> bytes:
    """end: what follows each call, with its stream where it has none."""
    return b"".join(
        call(path, stream, flags) + (frame(end[3], end[4], stream, end[9:]) if end else b"")
        for stream in range(1, 2 * count, 2)
    )


def attack(cluster: Cluster, port: str, what: str, contents: Sequence[bytes], *, rounds: int = 1) -> None:
    memory = Memory(cluster)
    with memory.bounded(f"{what} at {port}"):
        for _ in range(rounds):
            with unread(cluster.services[port].address, contents) as sent:
                assert any(sent)
                time.sleep(3.0 if rounds > 1 else 0.5)


PINGS = [pytest.param(100_000), pytest.param(1_000_000, marks=pytest.mark.slow)]
STREAMS = [pytest.param(300, 1), pytest.param(1000, 5, marks=pytest.mark.slow)]
SETTINGS_ACK = frame(SETTINGS, ACK, 0)


@pytest.mark.slow
@pytest.mark.parametrize("count", PINGS)
@pytest.mark.parametrize("port", GRPC_PORTS)
def test_pings(cluster: Cluster, port: str, count: int) -> None:
    attack(cluster, port, f"{count} pings", [OPENING + frame(PING, 0, 0, bytes(8)) * (count // 5)] * 5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("count", "rounds"), STREAMS)
@pytest.mark.parametrize("path", ["call", "/unknown.Service/Method"])
@pytest.mark.parametrize("port", GRPC_PORTS)
def test_streams(cluster: Cluster, port: str, path: str, count: int, rounds: int) -> None:
    content = calls(CALLS[port] if path == "call" else path, count)
    # with and without an answer to the server's settings, on which gRPC's own limits depend
    contents = [OPENING + content, OPENING + SETTINGS_ACK + content] * 10
    attack(cluster, port, f"{rounds} x 20 x {count} streams of {path}", contents, rounds=rounds)


@pytest.mark.few(1)
@pytest.mark.parametrize("port", GRPC_PORTS)
def test_other_floods(cluster: Cluster, port: str) -> None:
    """A client may also send these in endless number without reading."""
    path, count = CALLS[port], 5000
    cut = call(path, 1)
    contents = {
        "open streams": calls(path, count, END_HEADERS),
        "reset streams": calls(path, count, END_HEADERS, frame(RST_STREAM, 0, 0, (8).to_bytes(4, "big"))),
        "streams with messages": calls(path, 500, END_HEADERS, frame(DATA, 0, 0, bytes(5 + 2000))),
        "settings": frame(SETTINGS, 0, 0, b"\0\4\0\0\xff\xff") * 20 * count,
        "window updates": frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 20 * count,
        "a header without an end": frame(HEADERS, 0, 1, header_block(path))
        + frame(CONTINUATION, 0, 1, b"\0\1x\x64" + b"y" * 100) * count,
        "half a frame": cut[: len(cut) // 2],
        "half a preface": PREFACE[:10],
    }
    memory = Memory(cluster)
    with memory.bounded(f"{len(contents)} floods at {port}"):
        for what, content in contents.items():
            opening = b"" if what == "half a preface" else OPENING + SETTINGS_ACK
            with unread(cluster.services[port].address, [opening + content] * 4) as sent:
                assert all(sent), what


@pytest.mark.parametrize(
    ("port", "limit_s"), [("prefill", WORKER_DROPS_S), pytest.param("router", ROUTER_DROPS_S, marks=pytest.mark.slow)]
)
def test_clients_that_do_not_read_are_disconnected(cluster: Cluster, port: str, limit_s: float) -> None:
    process = psutil.Process(cluster.services[port].process.pid)
    wait_until(lambda: not connected(process, cluster.services[port].address), "earlier clients are gone")
    with unread(cluster.services[port].address, [OPENING + frame(PING, 0, 0, bytes(8)) * 50_000] * 5):
        assert connected(process, cluster.services[port].address)
        sent_at = time.monotonic()
        wait_until(lambda: not connected(process, cluster.services[port].address), "they are disconnected")
        assert time.monotonic() - sent_at < 2 * limit_s


def connected(process: psutil.Process, address: str) -> int:
    """Connections of this test at the address."""
    port, mine = int(address.rpartition(":")[2]), {one.laddr.port for one in psutil.Process().net_connections("tcp")}
    return sum(one.laddr.port == port and one.raddr.port in mine for one in process.net_connections("tcp") if one.raddr)


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["front end", "metrics"])
def test_http(cluster: Cluster, where: str, count: int) -> None:
    """Pipelined requests whose answers are large and need no key, half requests, and requests that cannot be read."""
    if where == "metrics":
        address, path = cluster.metrics_url(cluster.services["prefill"]).removeprefix("http://"), "/metrics"
    else:
        address, path = cluster.router.http, "/openapi.json"
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    contents = [
        request * 200,
        request[:-2],
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(99),
    ]
    memory = Memory(cluster)
    with memory.bounded(f"{count} clients at the {where}"):
        for content in contents:
            with unread(address, [content] * count) as sent:
                assert all(sent)
                time.sleep(1.0)
        for _ in range(10):
            with unread(address, [b"no request at all\r\n\r\n"] * count):
                pass
        with urllib.request.urlopen(f"http://{address}{path}", timeout=HANG_S) as response:
            assert response.status == 200
    if where == "front end":
        assert cluster.router.read_log().count("Invalid HTTP request") <= 2
