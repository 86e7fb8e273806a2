"""`WorkerTelemetry`: makes metrics and spans of every call's record."""

from __future__ import annotations

import logging

from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.telemetry.service_telemetry import ServiceTelemetry
from pdserve.common.worker_identity import WorkerIdentity
from pdserve.worker.engine_client import EngineClient, RequestEnd
from pdserve.worker.telemetry.call_stats import Call, CallStats
from pdserve.worker.telemetry.worker_metrics import WorkerMetrics
from pdserve.worker.worker_roles import WorkerRoles

log = logging.getLogger(__name__)


class WorkerTelemetry(ServiceTelemetry):
    """Telemetry of one worker."""

    def __init__(self, identity: WorkerIdentity, engine: EngineClient, roles: WorkerRoles) -> None:
        super().__init__(identity.role_name, identity.worker_id)
        self._identity = identity
        self._metrics = WorkerMetrics(self._registry, identity, engine, roles)

    def call(self, call: Call, request: EngineCoreRequest) -> CallStats:
        """Begin the record of a call, or of a session's turn."""
        return CallStats(call, request, self._closed)

    def fetched(self, end: RequestEnd) -> None:
        """Count the blocks of a request that only fetches."""
        self._metrics.received(end.received)

    def _closed(self, record: CallStats) -> None:
        self._metrics.call(record)
        if self._telemetry is not None:
            from pdserve.worker.telemetry.call_spans import trace_call

            try:
                trace_call(
                    self._telemetry.tracing, record, self._identity.worker_id, self._identity.layout.mean_block_bytes
                )
            except Exception:
                log.exception("the spans of %s could not be made", record.request.request_id)
