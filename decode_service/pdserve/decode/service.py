"""The decode role, composed: a worker that serves decode calls and sessions."""

from __future__ import annotations

import grpc

from pdserve.common.errors import InternalError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.decode.decode_servicer import DecodeServicer
from pdserve.worker.worker import Worker


def add_servicers(worker: Worker, server: grpc.aio.Server) -> list[str]:
    """Register what makes a worker a decode worker; returns the service names."""
    settings = worker.settings
    if not isinstance(settings, DecodeSettings):
        raise InternalError(f"a decode worker needs DecodeSettings, not {type(settings).__name__}")
    servicer = DecodeServicer(
        settings, worker.reader, worker.engine, worker.telemetry, worker.identity.layout.total_block_bytes
    )
    return [worker.serve_calls({"decode": servicer.begin_decode, "session": servicer.begin_session})]
