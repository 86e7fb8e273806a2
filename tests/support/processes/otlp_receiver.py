"""A collector for tests: an OTLP gRPC server that keeps the spans it is sent, by trace."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.run.waiting import HANG_S


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire."""

    service: str
    version: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool
    cause: str
    links: list[tuple[str, str]]
    """Trace and span of each."""

    @property
    def part(self) -> str:
        """`request` for the root of a request, whose name is its operation and model; else the name."""
        named = f"{self.attributes.get('gen_ai.operation.name')} {self.attributes.get('gen_ai.request.model')}"
        return "request" if self.name == named else self.name

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects over gRPC."""

    url: str = ""
    num_exports: int = 0
    _spans: dict[str, list[ReceivedSpan]] = field(default_factory=dict)
    _came: threading.Condition = field(default_factory=threading.Condition)

    @property
    def variables(self) -> dict[str, str]:
        """OpenTelemetry's, by which a service sends its spans here, 20 ms after they ended."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
        }

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._came:
            self.num_exports += 1
            for resource_spans in request.resource_spans:
                resource = _values(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        received = _received(resource, span)
                        self._spans.setdefault(received.trace_id, []).append(received)
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, complete: Callable[[list[ReceivedSpan]], bool], trace_id: str) -> list[ReceivedSpan]:
        """The trace's spans, as soon as they are complete."""
        deadline = time.monotonic() + HANG_S
        with self._came:
            while not complete(spans := self._spans.get(trace_id, [])):
                left = deadline - time.monotonic()
                assert left > 0, f"only {[(span.service, span.name) for span in spans]} came"
                self._came.wait(left)
            return list(spans)

    def trace_ids(self) -> set[str]:
        with self._came:
            return set(self._spans)


def _received(resource: dict[str, Any], span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource["service.name"],
        version=resource["service.version"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=[event.name for event in span.events],
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        cause=span.status.message,
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    )


def _values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: plain(attribute.value) for attribute in attributes}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Listens on a free port of loopback while the block runs; services that are made meanwhile send their spans there."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with patch.dict(os.environ, receiver.variables):
            yield receiver
    finally:
        server.stop(None).wait()
