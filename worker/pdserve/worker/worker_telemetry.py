"""`WorkerTelemetry`: makes metrics and spans of every call's record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from pdserve.common.net.loop_lag import LoopLag
from pdserve.common.net.tls_renewal import PeerKind
from pdserve.common.registry.circuit_breaker import CircuitBreaker
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.trace_headers import valid_trace_headers
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.telemetry.metrics import Exposition, RedisCollector, TlsCollector, make_registry
from pdserve.common.telemetry.telemetry import make_telemetry
from pdserve.worker.call_stats import Call, CallStats
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.identity import WorkerIdentity
from pdserve.worker.worker_metrics import TransferCounts, WorkerMetrics

log = logging.getLogger(__name__)


class WorkerTelemetry:
    """Telemetry of one worker, used in the asyncio thread. `close` it."""

    def __init__(
        self,
        settings: WorkerSettings,
        identity: WorkerIdentity,
        engine: EngineClient,
        transfers: TransferCounts,
    ) -> None:
        """Raises: ConfigError for an invalid collector."""
        self._identity = identity
        self._telemetry = make_telemetry(settings, identity.role.value, identity.peer.worker_id)
        self._registry = make_registry(self._telemetry.counts if self._telemetry else None)
        self._metrics = WorkerMetrics(self._registry, identity, engine, transfers)
        self.loop_lag = LoopLag(self._registry)
        self._text = Exposition(self._registry)

    def call(self, call: Call, request: EngineCoreRequest, metadata: Mapping[str, str]) -> CallStats:
        """Begin the record of a call. metadata: the call's metadata, names in lower case."""
        headers = valid_trace_headers(metadata) or request.trace_headers
        return CallStats(call, request, headers, self._closed)

    def watch_redis(self, breaker: CircuitBreaker, events: Callable[[], Mapping[str, int]]) -> None:
        """Export metrics about this service's use of Redis; see `RedisCollector`."""
        self._registry.register(RedisCollector(breaker, events))

    def watch_tls(self, expiries: Callable[[], Mapping[PeerKind, float]]) -> None:
        """Export the expiry of certificates; see `TlsCollector`."""
        self._registry.register(TlsCollector(expiries))

    async def exposition(self) -> bytes:
        """The current metrics."""
        return await self._text.text()

    async def close(self) -> None:
        """Export the last spans, within a time limit."""
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.tracing.close)

    def _closed(self, record: CallStats) -> None:
        self._metrics.call(record)
        if self._telemetry is not None:
            from pdserve.worker.call_spans import trace_call

            try:
                trace_call(
                    self._telemetry.tracing, record, self._identity.peer.worker_id, self._identity.layout.block_bytes
                )
            except Exception:
                log.exception("the spans of %s could not be made", record.request.request_id)
