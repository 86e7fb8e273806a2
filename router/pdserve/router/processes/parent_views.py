"""`ParentViews`: a router's views over all of its processes: added metrics, one status, and requests wherever they are."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pdserve.common.errors import NotFound, PdServeError, PeerError
from pdserve.common.telemetry.metrics import Exposition, Families, make_registry
from pdserve.common.timeline import now_unix_ns
from pdserve.router.admission.admission import Admission
from pdserve.router.placement.routing_decision import LOG_LENGTH
from pdserve.router.placement.worker_selector import admission_numbers
from pdserve.router.process_link import Handler, ProcessLink
from pdserve.router.processes.router_child import METRICS_S, RouterChild
from pdserve.router.requests import router_views as calls
from pdserve.router.requests.router_views import AskedRequestView, OwnStatus
from pdserve.router.telemetry.metric_families import FamiliesRegistry, MetricFamilies, MetricFamily, added, families_of
from pdserve.router.telemetry.recent_window import recent_view
from pdserve.router.telemetry.status import admission_view
from pdserve.router.telemetry.status_view import (
    MAX_SLOWEST,
    MAX_WORKERS,
    AdmissionView,
    RequestView,
    StatusView,
    WorkerView,
)
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.tenants.client import Client

T = TypeVar("T")
_ERRORS = "pdserve_errors"


class ParentViews:
    """Serves `SharedViews` of the processes, and `/metrics`. A process that does not answer in time is left out."""

    def __init__(self, children: Callable[[], Sequence[RouterChild]], admission: Admission, keys: ApiKeys) -> None:
        """children: returns all processes, also those that have just ended."""
        self._children = children
        self._admission = admission
        self._keys = keys
        self._started_unix_ns = now_unix_ns()
        self._ended = MetricFamilies()
        """Counters of processes that have ended."""
        self.num_restarts = 0
        registry = make_registry(None)
        registry.register(Families(lambda: process_families(len(self._listening()), self.num_restarts)))
        self._own = Exposition(registry)

    @property
    def handlers(self) -> dict[str, Handler]:
        """Calls of the processes."""
        return {
            calls.METRICS: Handler(bool, lambda by_key: self.metrics(by_key=by_key)),
            calls.STATUS: Handler(Client, self.status),
            calls.REQUEST: Handler(AskedRequestView, self.request),
            calls.ROUTING: Handler(Client, self.routing),
            calls.NUM_REQUESTS: Handler(type(None), lambda _: self._admission.num_requests),
        }

    def _listening(self) -> list[RouterChild]:
        return [child for child in self._children() if child.is_ready]

    def keep(self, child: RouterChild) -> None:
        """Keep the counters of a process that has ended: a counter never falls."""
        self._ended = added([self._ended, child.families.lasting()])
        child.families = MetricFamilies()

    async def fetch(self) -> None:
        """Have all processes report, so that little is lost when one ends."""
        await asyncio.gather(*(child.fetch_families() for child in self._children()))

    async def metrics(self, *, by_key: bool = False) -> bytes:
        """All metrics in Prometheus' text format. by_key: include metrics per API key, which are for operators."""
        processes = await asyncio.gather(*(child.fetch_families() for child in self._children()))
        names, ended = {entry.name for entry in self._keys.entries}, self._ended

        def text(own: Sequence[Any]) -> bytes:
            mine = MetricFamilies([family for registry in own for family in families_of(registry)])
            total = added([mine, *processes, ended])
            text = generate_latest(FamiliesRegistry(total.families))
            return text + generate_latest(FamiliesRegistry(_of(names, total.of_keys))) if by_key else text

        return await self._own.read(text)

    async def status(self, client: Client) -> StatusView:
        """Raises: PeerError if no process answers."""
        own = await self._ask(calls.OWN_STATUS, client, OwnStatus)
        views = [each.status for each in own]
        seen = admission_view(client, self._admission)
        return merged_status(views, own, seen, client, self._started_unix_ns, self._ended_errors())

    async def request(self, asked: AskedRequestView) -> RequestView:
        """Raises: NotFound."""
        return (await self._ask(calls.OWN_REQUEST, asked, RequestView))[0]

    async def routing(self, client: Client) -> dict[str, Any]:
        """Raises: PeerError if no process answers."""
        views: list[dict[str, Any]] = await self._ask(calls.OWN_ROUTING, client, dict)
        placements = [placement for view in views for placement in view["placements"]]
        placements.sort(key=lambda placement: placement["time_unix_s"], reverse=True)
        numbers = admission_numbers(client, self._admission)
        return views[0] | numbers | {"placements": placements[:LOG_LENGTH]}

    async def _ask(self, name: str, argument: object, kind: type[T]) -> list[T]:
        """Results of all processes that have one. Raises: PeerError, or NotFound, if there is none."""

        async def ask(link: ProcessLink) -> T | PdServeError:
            try:
                return await link.call(name, argument, kind, METRICS_S)
            except PdServeError as error:
                return error

        links = [child.link for child in self._listening() if child.link is not None]
        answers = await asyncio.gather(*map(ask, links))
        found = [answer for answer in answers if not isinstance(answer, PdServeError)]
        if not found:
            unknown = [answer for answer in answers if isinstance(answer, NotFound)]
            raise unknown[0] if unknown else PeerError("no process of this router answers").for_clients()
        return found

    def _ended_errors(self) -> Counter[str]:
        errors: Counter[str] = Counter()
        for family in self._ended.families:
            if family.name == _ERRORS:
                for _, labels, value in family.samples:
                    errors[labels["code"]] += int(value)
        return errors


def _of(names: set[str], families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """The series of these keys."""
    return [
        msgspec.structs.replace(family, samples=[each for each in family.samples if each[1].get("key") in names])
        for family in families
    ]


def process_families(num_processes: int, num_restarts: int) -> Iterable[Metric]:
    """The processes of a router."""
    yield GaugeMetricFamily("pdserve_router_processes", "Router processes that listen.", value=num_processes)
    yield CounterMetricFamily("pdserve_router_process_restarts", "Router processes started again.", value=num_restarts)


def merged_status(
    views: Sequence[StatusView],
    own: Sequence[OwnStatus],
    admission: AdmissionView,
    client: Client,
    started_unix_ns: int,
    errors: Counter[str],
) -> StatusView:
    """One status. views: of the processes, at least one. errors: of processes that have ended; code -> number."""
    errors = sum((Counter(view.errors) for view in views), errors)
    workers = _merged_workers([view.workers for view in views])
    slowest = [request for view in views for request in view.slowest]
    return msgspec.structs.replace(
        views[0],
        healthy=any(view.healthy for view in views),
        uptime_s=(now_unix_ns() - started_unix_ns) / 1e9,
        queue=admission.queue,
        num_tenants=admission.num_tenants,
        tenants=admission.tenants,
        recent=recent_view([each.window for each in own], sees_all=client.sees_all),
        slowest=heapq.nlargest(MAX_SLOWEST, slowest, key=lambda request: request.duration_s),
        kept_requests=sum(view.kept_requests for view in views),
        num_workers=max(view.num_workers for view in views),
        workers=workers,
        errors=dict(errors),
        num_indexed_blocks=max(view.num_indexed_blocks for view in views),
        transfer_bytes_per_s=max(view.transfer_bytes_per_s for view in views),
    )


def _merged_workers(processes: Sequence[Sequence[WorkerView]]) -> list[WorkerView]:
    """Each worker once, as it is seen by the process that sees most of them, with the calls of all processes."""
    num_calls: Counter[tuple[str, str, str]] = Counter()
    found: dict[tuple[str, str, str], WorkerView] = {}
    for workers in sorted(processes, key=lambda workers: sum(not each.cause for each in workers), reverse=True):
        for worker in workers:
            key = (worker.role, worker.worker_id, worker.address)
            num_calls[key] += worker.num_calls
            found.setdefault(key, worker)
    return [
        msgspec.structs.replace(worker, num_calls=num_calls[key]) for key, worker in list(found.items())[:MAX_WORKERS]
    ]
