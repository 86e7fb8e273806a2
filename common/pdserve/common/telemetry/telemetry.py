"""From OpenTelemetry's variables to a process's `Tracing`. The SDK is not loaded unless a collector is named."""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

from pdserve.common.settings.collector import Collector, read_collector

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from pdserve.common.telemetry.metrics import ExportCounts
    from pdserve.common.telemetry.tracing import Tracing

log = logging.getLogger(__name__)


class Telemetry(NamedTuple):
    """A process's tracing, and the outcomes of its spans."""

    tracing: Tracing
    counts: ExportCounts


def make_telemetry(service: str, instance: str) -> Telemetry | None:
    """None when no collector is named or the SDK is disabled. service: `router`, `prefill` or `decode`.

    Sampler, batches, headers and further attributes are those of the SDK's variables. Returns at once, whether the collector
    answers or not.
    """
    collector = read_collector(os.environ)
    if collector is None:
        return None
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    from pdserve.common.telemetry.span_export import SpanExport
    from pdserve.common.telemetry.tracing import Tracing

    own = {
        "service.name": f"pdserve-{service}",
        "service.namespace": "pdserve",
        "service.version": version("pdserve"),
        "service.instance.id": instance,
    }
    # they repeat with each batch what `SpanExport` logs once and counts
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)
    export = SpanExport(_exporter(collector), str(collector))
    log.info("spans go to %s", collector)
    return Telemetry(Tracing(Resource(own).merge(OTELResourceDetector().detect()), export), export.counts)


def _exporter(collector: Collector) -> SpanExporter:
    """It reads the endpoint and its options from the variables."""
    if collector.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter()
