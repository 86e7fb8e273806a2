"""`pdserve up`: router, prefill and decode workers on this machine; the router runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from pdserve.cli.child_report import LoadReport
from pdserve.cli.worker_child import ChildPlan, WorkerChild
from pdserve.common.address.descriptors import raise_descriptor_limit
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import new_deployment_key, resolve_deployment_key
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import ENV_PREFIX, from_toml, load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.router.service import run_router

log = logging.getLogger(__name__)

CHILD_DRAIN_S = 35.0
JOIN_S = 10.0
JOIN_LOOK_S = 0.02
MIN_CORES_FOR_PINNING = 2


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The arguments of `up`."""

    model: str
    folder: Path
    num_prefill: int
    num_decode: int
    router_flags: dict[str, object]
    worker_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Role -> settings of its workers, beside those that `child_plans` sets."""
    quiet_children: bool = True
    redis: str | None = None
    config: Path | None = None
    """TOML file with settings, for every service."""


@dataclass(slots=True)
class Addresses:
    """Addresses of the cluster, once it is ready."""

    http: str
    grpc: str
    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    api_key: str | None = None
    """An API key that the front ends accept, if they need one."""


def settings_by_role(assignments: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Role -> the assigned settings that its service has. Raises: ConfigError for a name that no service has."""
    kinds = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}
    for name in assignments:
        if not any(name in kind.__struct_fields__ for kind in kinds.values()):
            raise ConfigError(f"--set {name}: no service has such a setting")
    return {
        role: {name: value for name, value in assignments.items() if name in kind.__struct_fields__}
        for role, kind in kinds.items()
    }


WhenReady = Callable[[Addresses], Awaitable[bool]]
"""Called once the cluster serves; False stops it again."""


async def run_cluster(plan: ClusterPlan, console: Console, when_ready: WhenReady) -> None:
    """Start everything, call `when_ready`, serve until SIGINT or SIGTERM, drain. Raises: ConfigError."""
    raise_descriptor_limit()
    given = load_settings(RouterSettings, flags=plan.router_flags, toml=plan.config)
    if given.front_tls_cert_file is not None:
        raise ConfigError("front_tls_cert_file is for `pdserve router`: `up` asks its own front ends, in the clear")
    key = new_deployment_key() if given.deployment_key is None else given.deployment_key
    key_file = None if given.deployment_key_file is None else Path(given.deployment_key_file)
    resolve_deployment_key(key, key_file, [])
    workers = [WorkerChild(child, lambda name, load: None) for child in child_plans(plan, key)]
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave.set)
    watchers: list[asyncio.Task[None]] = []
    try:
        with _progress_bars(console, workers):
            await _until(leave, asyncio.gather(*(worker.start() for worker in workers)))
        if leave.is_set():
            return
        watchers = [asyncio.create_task(worker.watch(), name=worker.plan.name) for worker in workers]
        prefill = [worker.address for worker in workers if worker.plan.role == "prefill"]
        decode = [worker.address for worker in workers if worker.plan.role == "decode"]
        flags = plan.router_flags | {"model": plan.model, "prefill": prefill, "decode": decode, "deployment_key": key}
        flags["redis"] = plan.redis
        settings = load_settings(RouterSettings, flags=flags, toml=plan.config)
        api_key = settings.api_keys[0] if settings.api_keys else os.environ.get("PDSERVE_API_KEY")
        addresses = Addresses("", "", prefill, decode, api_key)
        await _route(settings, plan.folder, addresses, when_ready, leave)
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(worker.stop(CHILD_DRAIN_S) for worker in workers))


async def _route(
    settings: RouterSettings, folder: Path, addresses: Addresses, when_ready: WhenReady, leave: asyncio.Event
) -> None:
    listening = asyncio.Event()

    def ready(http_address: str, grpc_address: str) -> None:
        addresses.http, addresses.grpc = http_address, grpc_address
        listening.set()

    async def greet() -> None:
        await listening.wait()
        await _all_live(addresses)
        if not await when_ready(addresses):
            leave.set()

    async with asyncio.TaskGroup() as group:
        greeting = group.create_task(greet())
        await run_router(settings, model_folder=folder, ready=ready, stop=leave)
        greeting.cancel()


async def _all_live(addresses: Addresses) -> None:
    """Wait until the router counts every worker as live, at most `JOIN_S`, so that the first question can use any worker."""
    expected = {"prefill": len(addresses.prefill), "decode": len(addresses.decode)}
    # a proxy in the environment is for other hosts
    async with httpx.AsyncClient(trust_env=False) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                while True:
                    workers = (await client.get(f"http://{addresses.http}/health")).json()["workers"]
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


def child_plans(plan: ClusterPlan, key: str) -> list[ChildPlan]:
    """One plan per worker, with a core of its own if there are enough cores. key: the deployment key.

    Settings are passed in the child's environment: any may be a secret, and every user of a machine can read command lines.
    """
    names = [("prefill", i) for i in range(plan.num_prefill)] + [("decode", i) for i in range(plan.num_decode)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    threads = max(1, len(cores) // len(names))
    # workers are pinned only to consecutive cores, and only if no two workers share one
    pin = len(cores) >= max(MIN_CORES_FOR_PINNING, len(names)) and cores[-1] - cores[0] == len(cores) - 1
    plans = []
    for place, (role, index) in enumerate(names):
        settings: dict[str, object] = {"num_threads": threads}
        if pin:
            settings["cpu_core"] = cores[0] + place * threads
        if plan.quiet_children:
            settings["log_level"] = "warning"
        in_file = from_toml(PrefillSettings if role == "prefill" else DecodeSettings, plan.config)
        # the environment overrides the file, so `up` sets no default that the file sets
        settings = {name: value for name, value in settings.items() if name not in in_file}
        settings |= {"model": plan.model, "worker_id": f"{role}-{index}", "deployment_key": key}
        if plan.redis is not None:
            settings["redis"] = plan.redis
        settings |= plan.worker_settings.get(role, {})
        environ = os.environ | {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
        flags = () if plan.config is None else ("--config", str(plan.config))
        plans.append(ChildPlan(role, f"{role}-{index}", flags, environ))
    return plans


@contextlib.contextmanager
def _progress_bars(console: Console, workers: Sequence[WorkerChild]) -> Iterator[None]:
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
