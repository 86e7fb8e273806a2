"""`pdserve up`: router, prefill and decode workers, on this machine or a Ray cluster; the router runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from pdserve.cli.ray_cluster.connection import ray_workers
from pdserve.cli.ray_cluster.ray_directory import RayDirectory
from pdserve.cli.up.child_report import LoadReport
from pdserve.cli.up.cluster_plan import ClusterPlan
from pdserve.cli.up.reserved_ports import reserved_ports
from pdserve.cli.up.startup_check import check_workers
from pdserve.cli.up.worker_child import WorkerChild
from pdserve.common.address.descriptors import raise_descriptor_limit
from pdserve.common.address.host_address import host_and_port, loopback_of
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.models.model_folder import model_folder
from pdserve.router.service import run_router
from pdserve.router.workers.fleet import Directory, IsStarting, nobody_starts
from pdserve.text.tokenization.tokenizer_folder import TokenizerFolder

if TYPE_CHECKING:
    from pdserve.cli.ray_cluster.ray_worker import RayWorker

CHILD_DRAIN_S = 35.0
JOIN_S = 10.0
"""Seconds within which the router should reach a worker that is ready."""
JOIN_LOOK_S = 0.02


@dataclass(slots=True)
class Addresses:
    """host:port of the services, once the cluster is ready."""

    http: str
    grpc: str
    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    """Name of a service -> the address of its `/metrics`."""
    api_key: str | None = None
    """An API key that the front ends accept, if they need one."""
    tls: bool = False
    """True if the front ends have TLS."""
    why_silent: str = ""
    """Why `up` cannot send a question; empty if it can."""
    has_chat: bool = True
    """False for a model without a chat template, which only completes texts."""


WhenReady = Callable[[Addresses], Awaitable[bool]]
"""Called once the cluster serves; the cluster stops if it returns False."""
Workers = Sequence["WorkerChild | RayWorker"]


@dataclass(frozen=True, slots=True)
class StartingWorkers:
    """Tells the router whether any worker is still starting, or has been ready for less than `JOIN_S`."""

    workers: Workers

    async def __call__(self) -> bool:
        since = time.monotonic() - JOIN_S
        return any(worker.ready_at is None or worker.ready_at > since for worker in self.workers)


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The Ray cluster on which `--ray` places the workers."""

    address: str
    timeout_s: float
    """Limit of the connection, and of the wait for resources."""
    verbose: bool
    """Print the output of workers on their nodes."""


def run_cluster(plan: ClusterPlan, console: Console, when_ready: WhenReady, on_ray: RayCluster | None = None) -> None:
    """Start everything, call `when_ready`, serve until SIGINT or SIGTERM, drain; a second signal ends everything at once.

    on_ray: the cluster for the workers; None: this machine. Raises: ConfigError; before any worker starts if a port is in use, the
    model is not found or cannot be served, a GPU is missing, or Ray has no room for the workers.
    """
    raise_descriptor_limit()
    with reserved_ports(plan.ports()) as (port, grpc_port, metrics_port, *ports_of_workers):
        folder = model_folder(plan.router.model)
        router = msgspec.structs.replace(plan.router, port=port, grpc_port=grpc_port, metrics_port=metrics_port)
        if on_ray is not None:
            with ray_workers(on_ray.address, on_ray.timeout_s, plan.children, verbose=on_ray.verbose) as placed:
                uvloop.run(_run(router, folder, placed, console, when_ready, RayDirectory(placed)))
            return
        check_workers(plan, folder)
        workers = [
            WorkerChild(child, folder, number) for child, number in zip(plan.children, ports_of_workers, strict=True)
        ]
        uvloop.run(_run(router, folder, workers, console, when_ready))


async def _run(
    settings: RouterSettings,
    folder: Path,
    workers: Workers,
    console: Console,
    when_ready: WhenReady,
    directory: Directory | None = None,
) -> None:
    """directory: finds workers whose addresses change; None: the addresses are fixed once the workers have started."""
    shutdown = Shutdown(announce=console.print)
    watchers: list[asyncio.Task[None]] = []
    with shutdown.on_signals():
        try:
            with _progress_bars(console, workers):
                await _until(shutdown.stop, asyncio.gather(*(worker.start() for worker in workers)))
            if shutdown.stop.is_set():
                return
            watchers = [asyncio.create_task(worker.watch(), name=worker.plan.name) for worker in workers]
            addresses = addresses_of(settings, workers)
            addresses.has_chat = bool(TokenizerFolder.read(folder).chat_templates())
            if directory is None:
                settings = msgspec.structs.replace(
                    settings, prefill=tuple(addresses.prefill), decode=tuple(addresses.decode)
                )
            await route(settings, folder, addresses, when_ready, shutdown, directory, StartingWorkers(workers))
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await asyncio.gather(*(worker.stop(CHILD_DRAIN_S, shutdown.hurry) for worker in workers))


def addresses_of(settings: RouterSettings, workers: Workers) -> Addresses:
    api_key = settings.api_keys[0] if settings.api_keys else os.environ.get("PDSERVE_API_KEY")
    why_silent = ""
    if settings.front_tls_cert_file is not None:
        why_silent = "the front ends have TLS, and `up` does not know which authority its clients trust"
    elif settings.asks_for_keys and api_key is None:
        why_silent = "clients need an API key: put one into PDSERVE_API_KEY"
    elif workers and all(worker.plan.role == "prefill" for worker in workers):
        why_silent = "there is no decode worker, so no text is generated"
    return Addresses(
        host_and_port(settings.host, settings.port),
        host_and_port(settings.host, settings.grpc_port),
        [worker.address for worker in workers if worker.plan.role == "prefill"],
        [worker.address for worker in workers if worker.plan.role == "decode"],
        {"router": host_and_port(settings.metrics_at, settings.metrics_port)}
        | {worker.plan.name: worker.metrics for worker in workers},
        api_key,
        settings.front_tls_cert_file is not None,
        why_silent,
    )


async def route(
    settings: RouterSettings,
    folder: Path,
    addresses: Addresses,
    when_ready: WhenReady,
    shutdown: Shutdown,
    directory: Directory | None = None,
    is_starting: IsStarting = nobody_starts,
) -> None:
    """Run the router until `shutdown`; call `when_ready` once it listens. Raises: ConfigError."""
    listening = asyncio.Event()

    def listens(http_address: str, grpc_address: str) -> None:
        # exempt loaded objects from garbage collection; a full collection over them would stop every stream for 0.1 s
        gc.freeze()
        listening.set()

    async def greet() -> bool:
        await listening.wait()
        if not addresses.tls:
            await _all_live(addresses)
        return await when_ready(addresses)

    routing = asyncio.create_task(
        run_router(
            settings,
            model_folder=folder,
            ready=listens,
            shutdown=shutdown,
            addresses=directory,
            is_starting=is_starting,
        )
    )
    greeting = asyncio.create_task(greet())
    try:
        await asyncio.wait({greeting, routing}, return_when=asyncio.FIRST_COMPLETED)
        if greeting.done() and (greeting.exception() is not None or not greeting.result()):
            shutdown.stop.set()
        await routing
        if greeting.done():
            greeting.result()
    finally:
        greeting.cancel()
        await asyncio.wait({greeting})


async def _all_live(addresses: Addresses) -> None:
    """Wait until the router counts every worker as live, at most `JOIN_S`, so that the first question can use any worker."""
    expected = {"prefill": len(addresses.prefill), "decode": len(addresses.decode)}
    # a proxy in the environment is for other hosts
    async with httpx.AsyncClient(trust_env=False) as client:
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(JOIN_S):
                while True:
                    workers = (await client.get(f"http://{loopback_of(addresses.http)}/health")).json()["workers"]
                    if {role: count["live"] for role, count in workers.items()} == expected:
                        return
                    await asyncio.sleep(JOIN_LOOK_S)


async def _until(leave: asyncio.Event, work: asyncio.Future[list[None]]) -> None:
    """Wait for the work; cancel it when the process gets a signal to stop."""
    leaving = asyncio.create_task(leave.wait())
    try:
        await asyncio.wait((leaving, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        leaving.cancel()
        if not work.done():
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


@contextlib.contextmanager
def _progress_bars(console: Console, workers: Workers) -> Iterator[None]:
    """One progress bar per worker while weights load."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {
            worker.plan.name: progress.add_task(worker.plan.name, total=None) for worker in workers
        }

        def loaded(name: str, load: LoadReport) -> None:
            progress.update(tasks[name], completed=load.loaded_bytes, total=load.total_bytes)

        for worker in workers:
            worker.on_load = loaded
        yield
