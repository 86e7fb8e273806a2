"""`RouterTelemetry`: makes a record for each client request, and holds the metrics and the tracer they go to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping

from pdserve.common.circuit_breaker import CircuitBreaker
from pdserve.common.errors import PdServeError
from pdserve.common.metrics import RedisCollector, exposition, make_registry
from pdserve.common.router_settings import RouterSettings
from pdserve.common.telemetry import make_telemetry
from pdserve.common.timeline import now_unix_ns
from pdserve.common.trace_headers import TRACEPARENT
from pdserve.router.request_record import RequestRecord
from pdserve.router.router_metrics import RouterMetrics

SPAN_NAME = "request"


class RouterTelemetry:
    """`close` it."""

    def __init__(
        self,
        settings: RouterSettings,
        model: str,
        num_requests: Callable[[], int],
        worker_counts: Callable[[], Mapping[str, Mapping[str, int]]],
        num_indexed_blocks: Callable[[], int],
    ) -> None:
        """Raises: ConfigError for a collector that cannot be."""
        self._model = model
        self._telemetry = make_telemetry(settings, "router", f"{socket.gethostname()}-{os.getpid()}")
        self._registry = make_registry(self._telemetry.counts if self._telemetry else None)
        self.metrics = RouterMetrics(self._registry, num_requests, worker_counts, num_indexed_blocks)

    def request(
        self,
        request_id: str,
        caller_headers: Mapping[str, str],
        operation: str = "text_completion",
        client_request_id: str = "",
    ) -> RequestRecord:
        """A client's request begins.

        caller_headers: its trace context, validated; may be empty. operation: what OpenTelemetry calls its kind.
        client_request_id: what the client calls it; may be empty.
        """
        started = now_unix_ns()
        if self._telemetry is None:
            headers = dict(caller_headers) or new_trace_headers()
            return RequestRecord(self.metrics, started, None, headers)
        attributes = {
            "pdserve.request.id": request_id,
            "gen_ai.response.id": request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.provider.name": "pdserve",
            "gen_ai.operation.name": operation,
        }
        if client_request_id:
            attributes["pdserve.client_request.id"] = client_request_id
        span = self._telemetry.tracing.root(SPAN_NAME, caller_headers, started, attributes)
        return RequestRecord(self.metrics, started, span, span.headers)

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Counts the error of a request that is refused before it has a record."""
        try:
            yield
        except PdServeError as error:
            self.metrics.requests.labels(error.code).inc()
            self.metrics.errors.labels(error.code).inc()
            raise

    def watch_redis(self, breaker: CircuitBreaker, events: Callable[[], Mapping[str, int]]) -> None:
        """Have metrics say how this service gets on with Redis; see `RedisCollector`."""
        self._registry.register(RedisCollector(breaker, events))

    def exposition(self) -> bytes:
        """The metrics as they stand."""
        return exposition(self._registry)

    async def close(self) -> None:
        """Export the last spans; bounded."""
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.tracing.close)


def new_trace_headers() -> dict[str, str]:
    """A trace context for a request without one, so that its logs and its workers share an id though nothing is traced."""
    return {TRACEPARENT: f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
