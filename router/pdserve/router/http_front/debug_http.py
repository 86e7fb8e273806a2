"""The status page `/`, and `/debug/*`: the JSON that the page, `pdserve top` and `pdserve trace` read, and the last placements."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.http_front.error_response import json_response
from pdserve.router.http_front.page_response import page_response
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.placement.worker_selector import routing_view
from pdserve.router.requests.inference import Inference
from pdserve.router.telemetry.status import status_of
from pdserve.router.tenants.api_keys import ApiKeys

_PAGE = Path(__file__).with_name("status_page.html")
_ALWAYS_ASIDE = 1 << 20
"""Bytes: fleets are large, and the router remembers 128 placements, each with one candidate per worker."""


class DebugHttp:
    """The page, which needs no key, and its data, which does where clients need one."""

    def __init__(self, inference: Inference, keys: ApiKeys) -> None:
        self._inference = inference
        self._keys = keys
        self._page = page_response(_PAGE.read_text())
        self.routes = [
            Route("/", self.page, methods=["GET"]),
            Route("/debug/status", self.status, methods=["GET"]),
            Route("/debug/requests/{request_id}", self.request, methods=["GET"]),
            Route("/debug/routing", self.routing, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        """The same for every deployment; contains no state."""
        return self._page

    async def status(self, request: Request) -> Response:
        """Workers, queues, rates and the slowest requests."""
        inference, client = self._inference, await authenticated(self._keys, request)
        view = status_of(
            client, inference.models.base, inference.fleet, inference.admission, inference.selector, inference.telemetry,
            healthy=inference.healthy,
        )  # fmt: skip
        return await self._large_json(view)

    async def request(self, request: Request) -> Response:
        """One request with its phases. Raises: NotFound."""
        client = await authenticated(self._keys, request)
        return json_response(self._inference.telemetry.request_log.find(request.path_params["request_id"], client))

    async def routing(self, request: Request) -> Response:
        """The last placements with their reasons, newest first."""
        inference, client = self._inference, await authenticated(self._keys, request)
        view = routing_view(client, inference.settings, inference.selector, inference.admission)
        return await self._large_json(view)

    async def _large_json(self, content: object) -> Response:
        return await self._inference.bodies.in_background_pool(_ALWAYS_ASIDE, lambda: json_response(content))
