"""`/metrics`, `/health` and `/debug/transfers` of a worker: answers, refusals, and clients that do not behave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.telemetry.metrics import CONTENT_TYPE
from pdserve.kv_transfer.control.transfer_view import TransferLog, TransfersPage
from pdserve.worker.telemetry.metrics_server import Health, MetricsServer
from tests.support.run.waiting import HANG_S
from tests.support.transfers.transfer_fakes import make_view


class Served:
    """A server and what it reports."""

    def __init__(self) -> None:
        self.health = Health(ok=True, status="ok", engine_tick=7, engine_tick_age_s=0.1)
        self.server = MetricsServer(self.metrics, lambda: self.health, self.transfers)

    async def metrics(self) -> bytes:
        return b"pdserve_up 1\n"

    async def transfers(self) -> TransfersPage:
        return TransferLog().page([make_view()])

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.port}{path}"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.server.start("127.0.0.1", 0)
    yield made
    await made.server.stop()


async def test_metrics_and_health(served: Served) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        metrics = await client.get(served.url("/metrics?ignored=1"))
        assert (metrics.status_code, metrics.text) == (200, "pdserve_up 1\n")
        assert metrics.headers["content-type"] == CONTENT_TYPE
        assert (await client.get(served.url("/health"))).json()["engine_tick"] == 7
        assert (await client.get(served.url("/ready"))).status_code == 200
        served.health = Health(ok=False, status="stuck", engine_tick=7, engine_tick_age_s=3.5)
        health = await client.get(served.url("/health"))
        assert (health.status_code, health.json()["status"]) == (503, "stuck")
        assert (await client.get(served.url("/ready"))).status_code == 503
        assert (await client.get(served.url("/live"))).status_code == 200
        assert (await client.head(served.url("/metrics"))).text == ""
        assert (await client.get(served.url("/"))).status_code == 404
        assert (await client.post(served.url("/metrics"), content=b"x")).status_code == 405


async def test_transfers_are_shown_to_clients_on_this_machine_only() -> None:
    served = Served()
    await served.server.start("0.0.0.0", 0)
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        page = await client.get(served.url("/debug/transfers"))
        assert page.json()["under_way"][0]["request_id"] == make_view().request_id
        assert (await client.post(served.url("/debug/transfers"))).status_code == 405
        forged = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1"}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by this
            elsewhere = f"http://{probe.getsockname()[0]}:{served.server.port}/debug/transfers"
        refused = await client.get(elsewhere, headers=forged)
        assert (refused.status_code, "request_id" in refused.text) == (403, False)
    await served.server.stop()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET\r\n\r\n", b"HTTP/1.1 400"),
        (b"\xff\x00 \xff HTTP/9\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /metrics HTTP/1.1\r\n" + b"x" * (1 << 18), b""),
        (b"GET /met", b""),
    ],
)
async def test_clients_that_speak_something_else(served: Served, sent: bytes, answer: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
    writer.write(sent)
    writer.write_eof()
    try:
        async with asyncio.timeout(HANG_S):
            assert (await reader.read()).startswith(answer)
    except ConnectionResetError:
        assert not answer
    writer.close()
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        assert (await client.get(served.url("/metrics"))).status_code == 200


async def test_a_port_in_use_is_told_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await Served().server.start("127.0.0.1", port)
