"""`run_worker`: runs a worker process from its settings to the end of its drain. `make_engine` loads its engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from pdserve.common.address.host_address import host_and_port
from pdserve.common.errors import ConfigError
from pdserve.common.net.connection_watch import ConnectionWatch
from pdserve.common.net.rpc import MAX_PEER_CONNECTIONS_PER_ADDRESS
from pdserve.common.net.tls_renewal import TlsRenewal
from pdserve.common.processes.memory_return import MemoryReturn
from pdserve.common.processes.shared_interpreter import share_interpreter
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.settings import describe
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.tasks.background_task import background_task
from pdserve.common.tasks.first_done import first_done
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.client.loaded_engine import LoadedEngine
from pdserve.engine.client.process_client import ProcessClient
from pdserve.engine.engine_thread import ENGINE_FAILED, in_event_loop
from pdserve.engine.runner.loading.loaded_model import LoadProgress, load_model
from pdserve.worker.engine_watchdog import EngineWatchdog
from pdserve.worker.ranks.join_ranks import WORKER_RANK
from pdserve.worker.telemetry.metrics_server import MetricsServer
from pdserve.worker.transfers.worker_transfers import TransferMemory, WorkerTransfers
from pdserve.worker.worker import MakeCalls, Worker

log = logging.getLogger(__name__)


async def run_worker(
    settings: WorkerSettings,
    model_folder: Path,
    calls: Mapping[WorkerRole, MakeCalls],
    other: WorkerSettings | ConfigError,
    *,
    on_ready: Callable[[WorkerIdentity], None] | None = None,
    progress: Progress | None = None,
) -> bool:
    """Load, serve in the role of `settings`, and drain on SIGTERM, SIGINT or a router's call; a second signal ends at once.

    calls, other: as of `Worker`.
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
        worker = Worker(settings, role, engine, key, calls, tls, other)
    except BaseException:
        await engine.shutdown()
        raise
    process = ProcessServices(worker)
    renewal = TlsRenewal(settings, tls)
    renewal.log_expiry()
    worker.telemetry.watch_tls(renewal.expiries)
    renewing = background_task("certificates", renewal.run)
    shutdown = Shutdown()
    with shutdown.on_signals():
        try:
            await worker.start(process.start)
            log.info(
                "%s is ready at %s: %d blocks of %d tokens, max_model_len %d, connectors %s, metrics http://%s/metrics",
                worker.identity.worker_id, worker.identity.address, worker.identity.num_blocks,
                worker.identity.layout.block_size, worker.identity.max_model_len, ", ".join(worker.identity.connectors),
                process.metrics_address,
            )  # fmt: skip
            # loaded objects remain: visiting all of them in a full collection would stop every stream for 0.1 s
            gc.freeze()
            if on_ready is not None:
                on_ready(worker.identity)
            await first_done(shutdown.stop.wait(), worker.drain_asked.wait(), worker.engine.died.wait())
            if not worker.engine.died.is_set():
                shutdown.announce_drain(worker.num_open, settings.drain_s)
                await first_done(worker.drain(), shutdown.hurry.wait())
        finally:
            renewing.cancel()
            await worker.stop()
            await process.stop()
            log.info("%s has stopped; %d threads left", worker.identity.worker_id, threading.active_count())
    return not worker.engine.died.is_set()


class ProcessServices:
    """What a worker's process has once: `/metrics` and probes over HTTP, a watchdog for the engine, and the care for memory and
    connections."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._metrics_server = MetricsServer(worker.telemetry.exposition, worker.health, worker.engine.transfers)
        self._watchdog: EngineWatchdog | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def metrics_address(self) -> str:
        """host:port of `/metrics`, after `start`."""
        return host_and_port(self._worker.settings.metrics_at, self._metrics_server.port)

    async def start(self) -> None:
        """Raises: ConfigError naming the address of `/metrics`."""
        worker, settings = self._worker, self._worker.settings
        share_interpreter()
        if settings.limits.engine_stuck_exit_s:
            self._watchdog = EngineWatchdog(
                lambda: worker.engine.tick, settings.limits.engine_stuck_exit_s, worker.core.kill
            )
            self._watchdog.start()
        await self._metrics_server.start(settings.metrics_at, settings.metrics_port)
        connections = ConnectionWatch(worker.port, MAX_PEER_CONNECTIONS_PER_ADDRESS)
        self._tasks = [
            background_task("loop_lag", worker.telemetry.loop_lag.run),
            background_task("connections", connections.run),
            background_task("memory", MemoryReturn().run),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._watchdog is not None:
            self._watchdog.stop()
        await self._metrics_server.stop()


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
    transfers = WorkerTransfers(settings, TransferMemory.of(settings, model, tls), deployment_key, tls)
    engine = LoadedEngine(model, settings, deployment_key, outbox=transfers)
    return InprocClient(engine, in_event_loop(loop), transfers, lambda _: ENGINE_FAILED)
