"""`make_host`: a worker's engine with its transfers, in this process or in one of its own, from a model folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.loaded_model import LoadProgress, load_model
from pdserve.kv_transfer.make_connectors import make_connectors
from pdserve.worker.engine_host.engine_host import EngineHost
from pdserve.worker.engine_host.make_inproc_host import make_inproc_host
from pdserve.worker.engine_host.proc_host import ProcHost
from pdserve.worker.ranks.join_ranks import WORKER_RANK

Progress = Callable[[int, int], None]
"""Takes the bytes of weights that are loaded, and of all."""


async def make_host(
    settings: WorkerSettings,
    folder: Path,
    deployment_key: DeploymentKey,
    tls: TlsIdentity | None = None,
    progress: Progress | None = None,
) -> EngineHost:
    """Load the model. progress: may be called in another thread.

    Raises: ConfigError, UnsupportedModel; WorkerLost when the engine's process ended meanwhile.
    """
    on_progress = progress or (lambda *_: None)
    if not settings.engine_process:

        def report(loaded: LoadProgress) -> None:
            on_progress(loaded.loaded_bytes, loaded.total_bytes)

        model = await asyncio.to_thread(load_model, folder, settings, report, WORKER_RANK)
        return make_inproc_host(settings, model, make_connectors(settings, tls=tls), deployment_key, tls)
    host = ProcHost(settings, deployment_key, on_progress)
    try:
        await host.load(folder)
    except BaseException:
        await host.close()
        raise
    return host
