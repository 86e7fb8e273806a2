"""`RouterTelemetry`: a router's metrics, tracer, audit log and record of traffic, and the traces of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from pdserve.common import clock
from pdserve.common.errors import PdServeError
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.telemetry.metrics import Exposition, Families, by_label
from pdserve.common.telemetry.service_telemetry import ServiceTelemetry
from pdserve.common.timeline import now_unix_ns
from pdserve.router.placement.block_moves import BlockMoves
from pdserve.router.telemetry.request_log import AskedRequest, RequestLog
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.telemetry.router_metrics import RouterMetrics
from pdserve.router.telemetry.traffic_record import TrafficRecord
from pdserve.router.tenants.audit_log import AuditLog
from pdserve.router.tenants.client import ANYBODY, ASKING, Client
from pdserve.router.tenants.key_metrics import KeyMetrics


class RouterTelemetry(ServiceTelemetry):
    """Telemetry of one router."""

    def __init__(
        self,
        settings: RouterSettings,
        model: str,
        num_requests: Callable[[], int],
        worker_counts: Callable[[], Mapping[str, Mapping[str, int]]],
        num_indexed_blocks: Callable[[], int],
        moves: BlockMoves,
        num_role_changes: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """Raises: ConfigError for an audit log or a record that cannot be written."""
        super().__init__("router", f"{socket.gethostname()}-{os.getpid()}")
        self._model = model
        self._trusts_strangers = settings.trusts_trace_headers()
        self.metrics = RouterMetrics(
            self._registry, num_requests, worker_counts, num_indexed_blocks, moves, num_role_changes
        )
        self._key_registry = CollectorRegistry()
        self.key_metrics = KeyMetrics(self._key_registry)
        self._text_by_key = Exposition(self._registry, self._key_registry)
        self.request_log = RequestLog()
        self.audit = AuditLog(settings.audit_log, model)
        self.traffic = TrafficRecord(settings)
        self._registry.register(Families(lambda: line_families(self.audit.counts, self.traffic.counts)))

    def request(
        self,
        request_id: str,
        caller_headers: Mapping[str, str],
        operation: str = "text_completion",
        client_request_id: str = "",
        client: Client = ANYBODY,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        lora_name: str = "",
    ) -> RequestTrace:
        """Begin the trace of a client's request.

        caller_headers: the client's trace context, validated; may be empty. operation: OpenTelemetry's name of the request's kind.
        client_request_id: the client's id of the request; may be empty. client: owner of the request. sampling: None for a request
        without output. max_tokens: the client's limit; None if it gave none. lora_name: the adapter; "" for none.
        """
        started = now_unix_ns()

        def on_end(record: RequestTrace) -> None:
            self._ended(record, client, request_id, operation, lora_name)

        trusted, model = self._trusts(client), lora_name or self._model
        span = None
        if self._telemetry is None:
            headers = (dict(caller_headers) if trusted else {}) or new_trace_headers()
        else:
            attributes: dict[str, str | int | float] = {
                "pdserve.request.id": request_id,
                "gen_ai.response.id": request_id,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.provider.name": "pdserve",
                "gen_ai.operation.name": operation,
            }
            if sampling is not None:
                attributes["gen_ai.request.temperature"] = sampling.temperature
                attributes["gen_ai.request.top_p"] = sampling.top_p
            if max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = max_tokens
            if client_request_id:
                attributes["pdserve.client_request.id"] = client_request_id
            if client.key_name:
                attributes |= {"pdserve.key": client.key_name, "pdserve.tenant": client.tenant}
            tracing = self._telemetry.tracing
            begin = tracing.root if trusted else tracing.linked_root
            span = begin(f"{operation} {model}", caller_headers, started, attributes)
            headers = span.headers
        record = RequestTrace(self.metrics, started, span, headers, on_end, self.traffic.is_on)
        self.request_log.began(
            record,
            AskedRequest(
                request_id=request_id, client_request_id=client_request_id, operation=operation, client=client,
                arrived_unix_ns=started,
            ),
        )  # fmt: skip
        return record

    def _trusts(self, client: Client) -> bool:
        """True if a client's trace context is used: its trace id, and its sampling decision."""
        return bool(client.key_name) if self._trusts_strangers is None else self._trusts_strangers

    @contextlib.contextmanager
    def count_rejections(self, client: Client | None = None) -> Iterator[None]:
        """Count the error of a request that is refused before it has a trace, in the task that serves it. client: if known."""
        started = clock.monotonic()
        ASKING.set(client)
        try:
            yield
        except PdServeError as error:
            self._refused(error, clock.monotonic() - started)
            self.metrics.requests.labels(error.code).inc()
            self.metrics.failed(error)
            raise

    def _ended(self, record: RequestTrace, client: Client, request_id: str, operation: str, lora_name: str) -> None:
        self.request_log.ended(record)
        self.traffic.ended(record, client.tenant)
        if lora_name:
            self.metrics.adapter_requests.add(lora_name, len(record.runs))
        for run in record.runs:
            self.key_metrics.ended(client, run.outcome)
            if run.num_output_tokens or run.cause is None:
                self.key_metrics.used(
                    client, prompt=run.num_prompt_tokens, cached=run.cached_tokens.total, output=run.num_output_tokens
                )
        cause = next((run.cause for run in record.runs if run.cause is not None), None)
        self.audit.request(
            client,
            request_id=request_id,
            operation=operation,
            num_prompts=len(record.runs),
            num_prompt_tokens=sum(run.num_prompt_tokens for run in record.runs),
            num_output_tokens=sum(run.num_output_tokens for run in record.runs),
            num_cached_tokens=sum(run.cached_tokens.total for run in record.runs),
            outcome=record.runs[0].outcome if cause is None else cause.code,
            status=200 if cause is None else cause.http_status,
            duration_s=(now_unix_ns() - record.started_unix_ns) / 1e9,
            lora_name=lora_name,
        )

    def _refused(self, error: PdServeError, duration_s: float) -> None:
        client = ASKING.get()
        if client is None:
            # failed authentications have their own line
            return
        self.key_metrics.ended(client, error.code)
        self.audit.request(
            client, request_id="", operation="", num_prompts=0, num_prompt_tokens=0, num_output_tokens=0,
            num_cached_tokens=0, outcome=error.code, status=error.http_status, duration_s=duration_s,
        )  # fmt: skip

    async def exposition(self, *, by_key: bool = False) -> bytes:
        """The current metrics. by_key: include metrics per API key, which are for operators."""
        return await (self._text_by_key if by_key else self._text).text()

    async def close(self) -> None:
        await asyncio.to_thread(self.audit.close)
        await asyncio.to_thread(self.traffic.close)
        await super().close()


def line_families(audit: Mapping[str, int], record: Mapping[str, int]) -> Iterable[Metric]:
    """Number of lines of the audit log and of the record of traffic, by outcome."""
    yield by_label(CounterMetricFamily, "pdserve_audit_lines", "Lines of the audit log.", ["outcome"], audit)
    yield by_label(CounterMetricFamily, "pdserve_record_lines", "Lines of the record of traffic.", ["outcome"], record)


def new_trace_headers() -> dict[str, str]:
    """A trace context for a request without one, so that logs of router and workers share an id without tracing."""
    return {TRACEPARENT: f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
