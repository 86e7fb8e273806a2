"""`run_parent`: the parent of several router processes: it holds the ports, counts for all, and restarts a process that ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pdserve.common.address.host_address import host_and_port
from pdserve.common.errors import ConfigError
from pdserve.common.net.http_server import bound_socket
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import describe
from pdserve.common.tasks.background_task import background_task
from pdserve.common.tasks.first_done import first_done
from pdserve.common.tasks.restart_backoff import RestartBackoff
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.child_admission import largest
from pdserve.router.admission.place import AdmissionLimits, Capacity
from pdserve.router.process_link import Handler
from pdserve.router.processes.parent_views import ParentViews
from pdserve.router.processes.router_child import IS_STARTING, ProcessStart, RouterChild
from pdserve.router.responses.response_store import MemoryResponseStore
from pdserve.router.responses.shared_response_store import store_handlers
from pdserve.router.telemetry.serving_metrics import serving_metrics
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.tenants.fleet_usage import make_fleet_usage
from pdserve.router.workers.fleet import IsStarting, nobody_starts

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
FETCH_EVERY_S = 5.0
"""Seconds between two reports of a process's counters: at most those of this time are lost with it."""
_END_S = 10.0
"""Seconds beyond `drain_s` in which a process must end."""


async def run_parent(
    settings: RouterSettings,
    *,
    model_folder: Path,
    ready: Callable[[str, str], None] | None = None,
    shutdown: Shutdown | None = None,
    is_starting: IsStarting = nobody_starts,
) -> None:
    """Serve with `router_processes` processes, as `run_router`. Raises: ConfigError, also for what a process cannot use."""
    log.info("settings: %s", describe(settings))
    key, _ = settings.key()
    signals: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if shutdown is None:
        shutdown = Shutdown()
        signals = shutdown.on_signals()
    with (
        signals,
        bound_socket(settings.host, settings.port) as http_port,
        bound_socket(settings.host, settings.grpc_port) as grpc_port,
    ):
        settings = msgspec.structs.replace(
            settings, port=http_port.getsockname()[1], grpc_port=grpc_port.getsockname()[1]
        )
        parent = RouterParent(settings, model_folder, shutdown, is_starting)
        tasks = {
            background_task("api_keys", parent.keys.follow),
            background_task("processes", parent.fetch_metrics),
        }
        if (usage := make_fleet_usage(settings, key, parent.admission.tenants)) is not None:
            tasks.add(background_task("usage", usage.run))
        try:
            async with serving_metrics(settings, parent.views.metrics):
                await parent.serve(ready)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class RouterParent:
    """`serve` once."""

    def __init__(
        self,
        settings: RouterSettings,
        model_folder: Path,
        shutdown: Shutdown,
        is_starting: IsStarting = nobody_starts,
    ) -> None:
        """settings: with the ports that the processes share. Raises: ConfigError."""
        self._settings = settings
        self._model_folder = model_folder
        self._shutdown = shutdown
        self.keys = ApiKeys.from_settings(settings)
        self.admission = Admission(
            AdmissionLimits.of(settings), self._capacity, num_tenants=lambda: self.keys.num_tenants
        )
        self._children: dict[int, RouterChild] = {}
        self.views = ParentViews(lambda: list(self._children.values()), self.admission, self.keys)
        self._shared = self.views.handlers | {IS_STARTING: Handler(type(None), lambda _: is_starting())}
        if settings.redis is None:
            self._shared = self._shared | store_handlers(MemoryResponseStore(settings))

    async def fetch_metrics(self) -> None:
        """Keep the processes' last metrics, until cancelled."""
        while True:
            await asyncio.sleep(FETCH_EVERY_S)
            await self.views.fetch()

    async def serve(self, ready: Callable[[str, str], None] | None) -> None:
        """Start the processes, and restart each that ends, until the shutdown; then let them drain.

        ready: called once all listen. Raises: ConfigError if one does not.
        """
        settings, shutdown = self._settings, self._shutdown
        keeping: list[asyncio.Task[None]] = []
        try:
            starting = asyncio.gather(*(self._start(number) for number in range(settings.router_processes)))
            await first_done(starting, shutdown.stop.wait())
            if not starting.done() or starting.cancelled():
                return
            starting.result()
            keeping = [asyncio.create_task(self._keep(child)) for child in list(self._children.values())]
            if ready is not None:
                ready(host_and_port(settings.host, settings.port), host_and_port(settings.host, settings.grpc_port))
            await shutdown.stop.wait()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
            shutdown.announce_drain(self.admission.num_requests, settings.drain_s)
            await asyncio.gather(
                *(child.stop(settings.drain_s + _END_S, shutdown.hurry) for child in self._children.values())
            )

    async def _start(self, number: int) -> RouterChild:
        """Raises: ConfigError."""
        start = ProcessStart(self._settings, str(self._model_folder), number)
        child = self._children[number] = RouterChild(start, self.admission, self._shared)
        await child.start()
        return child

    async def _keep(self, child: RouterChild) -> None:
        """Restart a process whenever it ends, until cancelled."""
        backoff = RestartBackoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        while True:
            began = time.monotonic()
            code = await child.ended()
            self.views.keep(child)
            wait_s = backoff.wait_s(time.monotonic() - began)
            log.warning(
                "router process %d ended with status %d; it is started again in %g s", child.number, code, wait_s
            )
            await asyncio.sleep(wait_s)
            self.views.num_restarts += 1
            try:
                child = await self._start(child.number)
                log.warning("router process %d listens again", child.number)
            except ConfigError as error:
                child = self._children[child.number]
                log.warning("router process %d: %s", child.number, error.message)

    def _capacity(self) -> Capacity:
        reports = [child.admission.capacity for child in self._children.values()]
        return largest([report for report in reports if report is not None])
