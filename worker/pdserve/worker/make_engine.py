"""`make_engine`: a worker's engine with its transfers, in this process or in one of its own, from a model folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.client.loaded_engine import LoadedEngine
from pdserve.engine.client.process_client import ProcessClient
from pdserve.engine.engine_thread import ENGINE_FAILED, in_event_loop
from pdserve.engine.runner.loading.loaded_model import LoadProgress, load_model
from pdserve.worker.ranks.join_ranks import WORKER_RANK
from pdserve.worker.transfers.worker_transfers import WorkerTransfers

Progress = Callable[[int, int], None]
"""Takes the bytes of weights that are loaded, and of all."""
ENGINE_PROGRAM = "pdserve.worker.engine_process"


async def make_engine(
    settings: WorkerSettings,
    folder: Path,
    deployment_key: DeploymentKey,
    tls: TlsIdentity | None = None,
    progress: Progress | None = None,
) -> EngineCoreClient:
    """Load the model. progress: may be called in another thread.

    Raises: ConfigError, UnsupportedModel; WorkerLost when the engine's process ended meanwhile.
    """
    on_progress = progress or (lambda *_: None)
    loop = asyncio.get_running_loop()
    if settings.engine_process:
        client = ProcessClient(folder, settings, deployment_key, ENGINE_PROGRAM, loop, on_progress)
        try:
            await asyncio.wrap_future(client.loaded)
        except BaseException:
            await client.shutdown()
            raise
        return client

    def report(loaded: LoadProgress) -> None:
        on_progress(loaded.loaded_bytes, loaded.total_bytes)

    model = await asyncio.to_thread(load_model, folder, settings, report, WORKER_RANK)
    transfers = WorkerTransfers(settings, model, deployment_key, tls)
    engine = LoadedEngine(model, settings, deployment_key, outbox=transfers)
    return InprocClient(engine, in_event_loop(loop), transfers, lambda _: ENGINE_FAILED)
