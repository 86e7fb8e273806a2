"""`WorkerActor`: runs one worker process on a node of a Ray cluster. Its arguments and results are plain types."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import cast

import ray
import ray.util

from pdserve.cli.doctor.port_check import Port
from pdserve.cli.up.child_report import LoadReport
from pdserve.cli.up.cluster_plan import ChildPlan, WorkerRole
from pdserve.cli.up.reserved_ports import reserved_ports
from pdserve.cli.up.worker_child import WorkerChild
from pdserve.common.errors import ConfigError
from pdserve.common.settings.catalogue import ENV_PREFIX
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings

STATUS_WITH_WORKER = 1


class WorkerActor:
    """Starts the worker's process and ends with it; Ray then restarts the actor, on another node if this one is lost.

    When Ray ends the actor, for example because the driver has ended, the lifeline closes and the worker's process drains.
    """

    def __init__(self) -> None:
        self._child: WorkerChild | None = None
        self._ports = contextlib.ExitStack()
        """Reserves the metrics port while the worker restarts."""
        self._hurry = asyncio.Event()
        self._stopping = False
        self._loaded = (0, 0)
        self._ready: dict[str, str] = {}

    async def start(self, name: str, role: str, given: Mapping[str, str], driver: str) -> dict[str, str]:
        """Start the worker and wait until it is ready. Returns `address` and `metrics`, or `error`: why it does not start.

        A repeated call returns the same result if the worker is ready, since the first answer may have been lost.
        given: `PDSERVE_<NAME>` -> text, every setting that is not the default, and the driver's `OTEL_...`.
        driver: the driver's version of pdserve.
        """
        if self._ready:
            return self._ready
        if (own := version("pdserve")) != driver:
            return {"error": f"{name}: pdserve is {own} on node {_own_host()} and {driver} here: they must be equal"}
        try:
            # Ray's variables stay, since its CUDA_VISIBLE_DEVICES names the GPU; settings come only from the driver
            environ = {key: value for key, value in os.environ.items() if not key.startswith((ENV_PREFIX, "OTEL_"))}
            environ |= {**given, "PDSERVE_HOST": _own_host(), "PDSERVE_ADVERTISE_HOST": _own_host()}
            settings = load_settings(PrefillSettings if role == "prefill" else DecodeSettings, environ=environ)
            metrics = Port("metrics_port", f"metrics of {name}", settings.metrics_at, settings.metrics_port)
            [port] = self._ports.enter_context(reserved_ports([metrics]))
            plan = ChildPlan(cast(WorkerRole, role), name, (), environ, settings)
            self._child = WorkerChild(plan, settings.model, port)
            self._child.on_load = self._on_load
            await self._child.start()
        except ConfigError as error:
            self._ports.close()
            text = error.message.removeprefix(f"{name}: ")
            return {"error": f"{name} on node {_own_host()}: {text}"}
        self._ready = {"address": self._child.address, "metrics": self._child.metrics}
        return self._ready

    def _on_load(self, name: str, load: LoadReport) -> None:
        self._loaded = (load.loaded_bytes, load.total_bytes)

    async def loaded(self) -> tuple[int, int]:
        """(loaded bytes of weights, all bytes of weights); (0, 0) before loading begins."""
        return self._loaded

    async def run(self) -> None:
        """Wait until the worker's process ends; then end this process too, or return if `stop` ended the worker."""
        assert self._child is not None
        code = await self._child.ended()
        if not self._stopping:
            print(f"the worker's process ended with status {code}", file=sys.stderr, flush=True)
            # an exit through Ray's API would count as intended, so that Ray would not restart the actor
            os._exit(STATUS_WITH_WORKER)

    async def stop(self, drain_s: float) -> None:
        """Let the worker drain for at most `drain_s` seconds, or until `hurry`; then end its process."""
        self._stopping = True
        if self._child is not None:
            await self._child.stop(drain_s, self._hurry)

    async def hurry(self) -> None:
        """End a drain and its open requests."""
        self._hurry.set()


def _own_host() -> str:
    """The address of this node, by which Ray's other nodes reach it."""
    host: str = ray.util.get_node_ip_address()
    return host
