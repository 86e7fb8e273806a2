"""`MetricsHttp`: serves the router's metrics at a port of its own, for Prometheus."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.net.connection_gate import ConnectionLimits
from pdserve.common.net.http_server import HttpServer
from pdserve.common.telemetry.metrics import CONTENT_TYPE
from pdserve.router.telemetry.router_telemetry import RouterTelemetry

_KEEP_ALIVE_S = 75.0
_GRACE_S = 1.0
_LIMITS = ConnectionLimits(total=64, per_address=32)


class MetricsHttp:
    """`/metrics` on a port of its own, in clear text and without a key."""

    def __init__(self, telemetry: RouterTelemetry) -> None:
        self._telemetry = telemetry
        routes = [Route("/metrics", self._answer, methods=["GET"])]
        self.server = HttpServer(Starlette(routes=routes), _KEEP_ALIVE_S, _GRACE_S, limits=_LIMITS)

    async def _answer(self, request: Request) -> Response:
        return Response(await self._telemetry.exposition(), headers={"content-type": CONTENT_TYPE})
