"""`run_worker`: runs a worker process from its settings to the end of its drain."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.settings import describe
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.common.tasks.first_done import first_done
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.worker.make_engine import Progress, make_engine
from pdserve.worker.worker import AddServicers, Worker

log = logging.getLogger(__name__)


async def run_worker(
    settings: WorkerSettings,
    model_folder: Path,
    add_servicers: AddServicers,
    *,
    on_ready: Callable[[WorkerIdentity], None] | None = None,
    progress: Progress | None = None,
) -> bool:
    """Load, serve in the role of `settings`, and on SIGTERM or SIGINT drain; a second signal ends at once.

    Returns False if the engine failed. Raises: ConfigError before anything is served.
    """
    log.info("settings: %s", describe(settings))
    key, is_public = settings.key()
    if is_public:
        log.warning("no deployment key: using the public development key, which is for loopback only")
    tls = settings.tls()
    role = WorkerRole(settings.section)
    engine = await make_engine(settings, model_folder, key, tls, progress)
    try:
        worker = Worker(settings, role, engine, key, add_servicers, tls)
    except BaseException:
        await engine.shutdown()
        raise
    renewal = TlsRenewal(settings, tls)
    renewal.log_expiry()
    worker.telemetry.watch_tls(renewal.expiries)
    renewing = background_task("certificates", renewal.run)
    shutdown = Shutdown()
    with shutdown.on_signals():
        try:
            await worker.start()
            # loaded objects remain: visiting all of them in a full collection would stop every stream for 0.1 s
            gc.freeze()
            if on_ready is not None:
                on_ready(worker.identity)
            await first_done(shutdown.stop.wait(), worker.engine.died.wait())
            if not worker.engine.died.is_set():
                shutdown.announce_drain(worker.num_open, settings.drain_s)
                await first_done(worker.drain(), shutdown.hurry.wait())
        finally:
            renewing.cancel()
            await worker.stop()
    return not worker.engine.died.is_set()
