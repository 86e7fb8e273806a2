"""The decode role, composed: a worker that answers `DecodeService`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from pdserve.common.errors import InternalError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.decode.decode_servicer import DecodeServicer
from pdserve.engine.runner.loaded_model import LoadProgress
from pdserve.v1 import decode_pb2_grpc
from pdserve.worker.identity import Role, WorkerIdentity
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import run_worker


def add_servicers(worker: Worker, server: grpc.aio.Server) -> list[str]:
    """Register what makes a worker a decode worker; returns the service names."""
    settings = worker.settings
    if not isinstance(settings, DecodeSettings):
        raise InternalError(f"a decode worker needs DecodeSettings, not {type(settings).__name__}")
    servicer = DecodeServicer(
        settings, worker.reader, worker.engine, worker.adapter, worker.telemetry, worker.model.layout.block_bytes
    )
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    return ["pdserve.v1.DecodeService"]


async def run_decode(
    settings: DecodeSettings,
    model_folder: Path,
    *,
    on_ready: Callable[[WorkerIdentity], None] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> bool:
    """Serve until SIGTERM. Returns whether the engine lived to the end. Raises: ConfigError."""
    return await run_worker(settings, Role.DECODE, model_folder, add_servicers, on_ready=on_ready, progress=progress)
