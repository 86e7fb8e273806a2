"""`RouterViews`: what a router shows of itself: metrics, status, requests and placements, over all of its processes."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from pdserve.router.admission.admission import Admission
from pdserve.router.placement.worker_selector import admission_numbers, routing_view
from pdserve.router.process_link import Handler, ProcessLink
from pdserve.router.requests.inference import Inference
from pdserve.router.telemetry.metric_families import MetricFamilies
from pdserve.router.telemetry.recent_window import RecentWindow
from pdserve.router.telemetry.status import admission_view, status_of
from pdserve.router.telemetry.status_view import AdmissionView, RequestView, StatusView
from pdserve.router.tenants.client import Client

METRICS, STATUS, REQUEST, ROUTING, NUM_REQUESTS = (
    f"views.{name}" for name in ("metrics", "status", "request", "routing", "num_requests")
)
"""Calls of a process at its parent."""
OWN_METRICS, OWN_STATUS, OWN_REQUEST, OWN_ROUTING = (
    f"own.{name}" for name in ("metrics", "status", "request", "routing")
)
"""Calls of the parent at a process."""


class OwnStatus(msgspec.Struct, frozen=True):
    """The status of one process."""

    status: StatusView
    window: RecentWindow


class AskedRequestView(msgspec.Struct, frozen=True):
    """A request that a client wants to see."""

    name: str
    client: Client


class RouterViews(Protocol):
    """client: whose view it is."""

    async def metrics(self, *, by_key: bool) -> bytes:
        """The metrics in Prometheus' text format. by_key: include metrics per API key, which are for operators."""

    async def status(self, client: Client) -> StatusView: ...

    async def request(self, name: str, client: Client) -> RequestView:
        """Raises: NotFound, also for another tenant's request."""

    async def routing(self, client: Client) -> dict[str, Any]:
        """The last placements, for JSON."""

    async def num_requests(self) -> int:
        """Prompts in the router."""


class OwnViews:
    """The views of one process. Without its admission, where the parent counts."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def metrics(self, *, by_key: bool) -> bytes:
        return await self._inference.telemetry.exposition(by_key=by_key)

    async def status(self, client: Client) -> StatusView:
        inference, admission = self._inference, self._inference.admission
        seen = admission_view(client, admission) if isinstance(admission, Admission) else AdmissionView()
        return status_of(
            client, inference.models.base, inference.fleet, seen, inference.selector, inference.telemetry,
            healthy=inference.healthy,
        )  # fmt: skip

    async def request(self, name: str, client: Client) -> RequestView:
        return self._inference.telemetry.request_log.find(name, client)

    async def routing(self, client: Client) -> dict[str, Any]:
        inference, admission = self._inference, self._inference.admission
        numbers = admission_numbers(client, admission) if isinstance(admission, Admission) else {}
        return routing_view(client, inference.settings, inference.selector, numbers)

    async def num_requests(self) -> int:
        return self._inference.admission.num_requests

    def handlers(self) -> dict[str, Handler]:
        """Serve these views to the parent."""

        async def metrics(_: None) -> MetricFamilies:
            return await self._inference.telemetry.families()

        async def status(client: Client) -> OwnStatus:
            window = self._inference.telemetry.request_log.window(client)
            return OwnStatus(await self.status(client), window)

        async def request(asked: AskedRequestView) -> RequestView:
            return await self.request(asked.name, asked.client)

        return {
            OWN_METRICS: Handler(type(None), metrics),
            OWN_STATUS: Handler(Client, status),
            OWN_REQUEST: Handler(AskedRequestView, request),
            OWN_ROUTING: Handler(Client, self.routing),
        }


class SharedViews:
    """The views over all processes, which the parent makes. Raises: also Draining when the parent has ended."""

    def __init__(self, link: ProcessLink) -> None:
        self._link = link

    async def metrics(self, *, by_key: bool) -> bytes:
        return await self._link.call(METRICS, by_key, bytes)

    async def status(self, client: Client) -> StatusView:
        return await self._link.call(STATUS, client, StatusView)

    async def request(self, name: str, client: Client) -> RequestView:
        return await self._link.call(REQUEST, AskedRequestView(name, client), RequestView)

    async def routing(self, client: Client) -> dict[str, Any]:
        return await self._link.call(ROUTING, client, dict)

    async def num_requests(self) -> int:
        return await self._link.call(NUM_REQUESTS, None, int)
