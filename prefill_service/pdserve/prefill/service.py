"""The prefill role, composed: a worker that answers `PrefillService` and lets others read its blocks."""

from __future__ import annotations

import grpc

from pdserve.prefill.prefill_servicer import PrefillServicer
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc
from pdserve.worker.step_stream.step_stream_servicer import CallHandler
from pdserve.worker.worker import Worker


def add_servicers(worker: Worker, server: grpc.aio.Server) -> list[str]:
    """Register what makes a worker a prefill worker; returns the service names."""
    servicer = PrefillServicer(worker.reader, worker.engine, worker.telemetry, worker.identity.layout)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    handler = CallHandler(prefill_pb2.PrefillRequest.FromString, servicer.begin_prefill)
    step_streams = worker.serve_step_streams({"prefill_request": handler})
    return ["pdserve.v1.PrefillService", step_streams, *worker.serve_source()]
