"""`MetricsServer`: `/metrics`, probes and `/debug/transfers` of a worker over HTTP, in the asyncio thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.net.health_probe import answer_live, probe_response
from pdserve.common.net.http_server import listening_socket
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.telemetry.metrics import metrics_server
from pdserve.kv_transfer.control.transfer_view import TransfersPage

_V4_IN_V6 = "::ffff:"
"""Prefix of an IPv4 client's address if the server listens on `::`."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `/health`; `ok` decides between 200 and 503."""

    ok: bool
    status: str
    """`ok`, `draining`, `stuck`, `quarantined` or `dead`."""
    engine_tick: int
    engine_tick_age_s: float


class MetricsServer:
    """A worker's HTTP server. `start` it, `stop` it."""

    def __init__(
        self,
        metrics: Callable[[], Awaitable[bytes]],
        health: Callable[[], Health],
        transfers: Callable[[], Awaitable[TransfersPage]],
    ) -> None:
        self._health = health
        self._transfers = transfers
        routes = [
            Route("/health", self._answer_health),
            Route("/ready", self._answer_ready),
            Route("/live", answer_live),
            Route("/debug/transfers", self._answer_transfers),
        ]
        self._server = metrics_server(metrics, routes)
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 selects a free port. Raises: ConfigError naming the address."""
        bound = listening_socket(host, port)
        self.port = bound.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Close the server; no effect if it was not started."""
        self._server.stop()
        if self._serving is not None:
            await self._serving

    async def _answer_health(self, request: Request) -> Response:
        health = self._health()
        return Response(msgspec.json.encode(health), 200 if health.ok else 503, media_type="application/json")

    async def _answer_ready(self, request: Request) -> Response:
        return probe_response(self._health().ok)

    async def _answer_transfers(self, request: Request) -> Response:
        """Serve `/debug/transfers`, only to clients on this machine: it names requests, and workers have no API keys."""
        client = request.client
        if client is None or not is_loopback(client.host.removeprefix(_V4_IN_V6)):
            return Response("only clients on this machine are answered here\n", 403, media_type="text/plain")
        return Response(msgspec.json.encode(await self._transfers()), media_type="application/json")
