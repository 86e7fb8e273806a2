"""`ServiceTelemetry`: the metrics and the tracer that every service has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pdserve.common.net.loop_lag import LoopLag
from pdserve.common.net.tls_renewal import PeerKind
from pdserve.common.registry.circuit_breaker import CircuitBreaker
from pdserve.common.telemetry.metrics import Exposition, Families, make_registry, redis_families, tls_families
from pdserve.common.telemetry.telemetry import make_telemetry


class ServiceTelemetry:
    """Telemetry of one service, used in the asyncio thread. `close` it."""

    def __init__(self, service: str, instance: str) -> None:
        """service, instance: as for `make_telemetry`."""
        self._telemetry = make_telemetry(service, instance)
        self._registry = make_registry(self._telemetry.counts if self._telemetry else None)
        self.loop_lag = LoopLag(self._registry)
        self._text = Exposition(self._registry)

    def watch_redis(self, breaker: CircuitBreaker, events: Callable[[], Mapping[str, int]]) -> None:
        """Export metrics about this service's use of Redis; see `redis_families`."""
        self._registry.register(Families(lambda: redis_families(breaker, events())))

    def watch_tls(self, expiries: Callable[[], Mapping[PeerKind, float]]) -> None:
        """Export the expiry of certificates; see `tls_families`."""
        self._registry.register(Families(lambda: tls_families(expiries())))

    async def exposition(self) -> bytes:
        """The current metrics."""
        return await self._text.text()

    async def close(self) -> None:
        """Export the last spans, within a time limit."""
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.tracing.close)
