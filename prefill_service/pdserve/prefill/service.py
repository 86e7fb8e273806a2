"""The prefill role, composed: a worker that serves prefill calls and embeddings, and lets others read its blocks."""

from __future__ import annotations

import grpc

from pdserve.prefill.prefill_servicer import PrefillServicer
from pdserve.worker.worker import Worker


def add_servicers(worker: Worker, server: grpc.aio.Server) -> list[str]:
    """Register what makes a worker a prefill worker; returns the service names."""
    servicer = PrefillServicer(worker.reader, worker.engine, worker.telemetry, worker.identity.layout)
    calls = worker.serve_calls({"prefill": servicer.begin_prefill, "embed": servicer.begin_embed})
    return [calls, *worker.serve_source()]
