"""The decode role, composed: a worker that answers `DecodeService`."""

from __future__ import annotations

import grpc

from pdserve.common.errors import InternalError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.decode.decode_servicer import DecodeServicer
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.step_stream.step_stream_servicer import CallHandler
from pdserve.worker.worker import Worker


def add_servicers(worker: Worker, server: grpc.aio.Server) -> list[str]:
    """Register what makes a worker a decode worker; returns the service names."""
    settings = worker.settings
    if not isinstance(settings, DecodeSettings):
        raise InternalError(f"a decode worker needs DecodeSettings, not {type(settings).__name__}")
    servicer = DecodeServicer(
        settings, worker.reader, worker.engine, worker.telemetry, worker.identity.layout.total_block_bytes
    )
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    handler = CallHandler(decode_pb2.DecodeRequest.FromString, servicer.begin_decode)
    return ["pdserve.v1.DecodeService", worker.serve_step_streams({"decode_request": handler})]
