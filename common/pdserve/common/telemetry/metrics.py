"""Parts that the metrics of all services share: one registry per service, buckets, and Prometheus' text format.

Names and meanings are listed in `docs/metrics.md`. Labels come from small sets: never a request id, never a
client's text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.net.connection_gate import ConnectionLimits
from pdserve.common.net.http_server import HttpServer
from pdserve.common.net.tls_renewal import PeerKind
from pdserve.common.registry.circuit_breaker import BreakerState, CircuitBreaker
from pdserve.common.registry.redis_connection import ERROR_KINDS
from pdserve.common.tasks.background_task import RESTARTS, TASK_NAMES

CONTENT_TYPE = CONTENT_TYPE_LATEST
_KEEP_ALIVE_S = 75.0
_GRACE_S = 1.0
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Bucket bounds, seconds, for phases, TTFT and whole requests: from one hop to a long answer."""
TOKEN_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Bucket bounds, seconds, for the time between two tokens."""


@dataclass(slots=True)
class ExportCounts:
    """Spans since start."""

    exported: int = 0
    dropped: int = 0
    """Spans dropped because the queue was full."""
    failed: int = 0
    """Spans that the collector did not accept."""


class Families(Collector):
    """Collects the families that a function returns at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
Label = TypeVar("Label", bound=str | tuple[str, ...])


def by_label(
    kind: type[Family], name: str, meaning: str, labels: Sequence[str], values: Mapping[Label, float]
) -> Family:
    """Make one family. values: label value -> value; with several labels, tuple in the order of `labels` -> value."""
    family = kind(name, meaning, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


def _process_families(counts: ExportCounts) -> Iterable[Metric]:
    """Spans by outcome, all zero for a process that does not trace, and background tasks that failed."""
    outcomes = {outcome: getattr(counts, outcome) for outcome in ("exported", "dropped", "failed")}
    yield by_label(CounterMetricFamily, "pdserve_spans", "Finished spans, by outcome.", ["outcome"], outcomes)
    meaning = "Background tasks that failed and were started again."
    restarts = {name: RESTARTS[name] for name in TASK_NAMES}
    yield by_label(CounterMetricFamily, "pdserve_background_task_restarts", meaning, ["task"], restarts)


def redis_families(breaker: CircuitBreaker, events: Mapping[str, int]) -> Iterable[Metric]:
    """State and errors of a service's Redis connection.

    events: values that were unusable, published again or asked elsewhere, by kind, since start.
    """
    up = breaker.state is BreakerState.CLOSED
    yield GaugeMetricFamily("pdserve_redis_up", "1 while Redis can be used.", value=int(up))
    errors = {kind: breaker.errors[kind] for kind in (*ERROR_KINDS, "bug")}
    yield by_label(CounterMetricFamily, "pdserve_redis_errors", "Operations that failed, by kind.", ["kind"], errors)
    meaning = "Unusable values, repeated publications and requests to workers, by kind."
    yield by_label(CounterMetricFamily, "pdserve_redis_events", meaning, ["kind"], events)


def tls_families(expiries: Mapping[PeerKind, float]) -> Iterable[Metric]:
    """Expiry of this service's certificates. expiries: as `TlsRenewal.expiries`."""
    name = "pdserve_tls_certificate_expiry_timestamp_seconds"
    meaning = "When a certificate of this service expires, in Unix time."
    yield by_label(GaugeMetricFamily, name, meaning, ["peers"], expiries)


def make_registry(counts: ExportCounts | None) -> CollectorRegistry:
    """A registry with what every service has. counts: None when it does not trace."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter and histogram, which nothing of ours reads
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Families(partial(_process_families, counts or ExportCounts())))
    return registry


def metrics_server(text: Callable[[], Awaitable[bytes]], routes: Sequence[Route] = ()) -> HttpServer:
    """Serves `/metrics` on a port of its own, in clear text and without a key. routes: further paths of that port."""

    async def answer(request: Request) -> Response:
        return Response(await text(), headers={"content-type": CONTENT_TYPE})

    app = Starlette(routes=[Route("/metrics", answer, methods=["GET"]), *routes])
    return HttpServer(app, _KEEP_ALIVE_S, _GRACE_S, limits=ConnectionLimits(total=64, per_address=32))


class Exposition:
    """Formats registries in a thread, since formatting takes milliseconds. For use in one event loop.

    Concurrent calls share one text.
    """

    def __init__(self, *registries: CollectorRegistry) -> None:
        self._registries = registries
        self._making: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """The metrics now, in Prometheus' text format; their type is `CONTENT_TYPE`."""
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make())
        return await asyncio.shield(self._making)

    async def _make(self) -> bytes:
        seen = [_Seen(registry) for registry in self._registries]
        return await asyncio.to_thread(lambda: b"".join(map(generate_latest, seen)))


class _Seen(Collector):
    """A registry with families that were collected before, in the event loop that changes their values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._safe: list[Collector] = []
        self._families: list[Metric] = []
        for collector in list(registry._collector_to_names):
            if isinstance(collector, MetricWrapperBase | ProcessCollector):
                self._safe.append(collector)
            else:
                self._families += collector.collect()

    def collect(self) -> Iterable[Metric]:
        for collector in self._safe:
            yield from collector.collect()
        yield from self._families
