"""The prefill role, composed: a worker that answers `PrefillService` and lets others read its blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.runner.loaded_model import LoadProgress
from pdserve.prefill.prefill_servicer import PrefillServicer
from pdserve.v1 import prefill_pb2_grpc
from pdserve.worker.identity import Role, WorkerIdentity
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import run_worker


def add_servicers(worker: Worker, server: grpc.aio.Server) -> list[str]:
    """Register what makes a worker a prefill worker; returns the service names."""
    servicer = PrefillServicer(
        worker.reader, worker.engine, worker.adapter, worker.telemetry, worker.transfers, worker.settings.block_size
    )
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
    return ["pdserve.v1.PrefillService", worker.serve_source()]


async def run_prefill(
    settings: PrefillSettings,
    model_folder: Path,
    *,
    on_ready: Callable[[WorkerIdentity], None] | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> bool:
    """Serve until SIGTERM. Returns whether the engine lived to the end. Raises: ConfigError."""
    return await run_worker(settings, Role.PREFILL, model_folder, add_servicers, on_ready=on_ready, progress=progress)
