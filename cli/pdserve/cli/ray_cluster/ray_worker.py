"""`RayWorker`: the driver's side of one worker on a Ray cluster. It has the methods of `WorkerChild`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.cli.ray_cluster.worker_actor import WorkerActor
from pdserve.cli.up.child_report import LoadReport
from pdserve.cli.up.cluster_plan import ChildPlan
from pdserve.common.errors import ConfigError
from pdserve.common.tasks.first_done import first_done

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between polls of how much of the weights has been loaded."""
AGAIN_AFTER_S = 1.0
"""Seconds between attempts to call an actor that Ray is restarting."""
HURRY_S = 5.0
"""Seconds that a worker has to exit after a second signal before its actor is killed."""


def resources_of(plan: ChildPlan) -> dict[str, float]:
    """Resources that Ray reserves for the worker: a CPU per thread, and a GPU if the device is one."""
    resources = {"CPU": float(plan.settings.num_threads)}
    return resources | {"GPU": 1.0} if plan.settings.device == "cuda" else resources


def reason_of(error: RayError) -> str:
    """The last line of the error: for an exception on the node, its type and message."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


class RayWorker:
    """One worker. `start` waits until it is ready; `watch` then follows it from node to node, as Ray restarts it."""

    def __init__(self, plan: ChildPlan, group: Any, place: int) -> None:
        """group: the Ray placement group. place: the index of this worker's bundle in it."""
        self.plan = plan
        self.address = ""
        """host:port; empty while Ray restarts the worker."""
        self.metrics = ""
        self.ready_at: float | None = None
        """`time.monotonic()` when it became ready; None while Ray starts it."""
        self.on_load: Callable[[str, LoadReport], None] = lambda name, load: None
        self._options = {
            "num_cpus": resources_of(plan)["CPU"],
            "num_gpus": resources_of(plan).get("GPU", 0),
            "max_restarts": -1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        }
        self._actor = self._make_actor()
        self._answers: set[asyncio.Future[Any]] = set()
        """Answers of calls that have not returned."""

    def _make_actor(self) -> Any:
        return ray.remote(WorkerActor).options(**self._options).remote()

    async def _result(self, call: Any) -> Any:
        """The result of an actor call. Ray's client requires that cancelling the wait does not cancel the call."""
        answer = asyncio.wrap_future(call.future())
        self._answers.add(answer)
        answer.add_done_callback(self._answered)
        return await asyncio.shield(answer)

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        self._answers.discard(answer)
        if not answer.cancelled():
            answer.exception()

    async def start(self) -> None:
        """Wait until the worker is ready. Raises: ConfigError naming worker and node, if it does not start."""
        loading = asyncio.create_task(self._report_load())
        try:
            given = (self.plan.name, self.plan.role, self.plan.environ, version("pdserve"))
            found = await self._result(self._actor.start.remote(*given))
        except RayError as error:
            raise ConfigError(f"{self.plan.name} was not started by Ray: {reason_of(error)}") from error
        finally:
            loading.cancel()
        if "error" in found:
            raise ConfigError(found["error"])
        self.address, self.metrics = found["address"], found["metrics"]
        self.ready_at = time.monotonic()

    async def _report_load(self) -> None:
        with contextlib.suppress(RayError):
            while True:
                loaded, total = await self._result(self._actor.loaded.remote())
                if total:
                    self.on_load(self.plan.name, LoadReport(loaded, total))
                await asyncio.sleep(LOOK_S)

    async def watch(self) -> None:
        """Follow the worker until cancelled: whenever its process, actor or node is lost, wait until Ray has restarted it."""
        while True:
            try:
                await self._result(self._actor.run.remote())
            except RayError:
                log.warning("%s at %s is lost; Ray restarts it", self.plan.name, self.address)
            self.address, self.ready_at = "", None
            while not self.address:
                await asyncio.sleep(AGAIN_AFTER_S)
                await self._restarted()
            log.warning("%s is back at %s (metrics %s)", self.plan.name, self.address, self.metrics)

    async def _restarted(self) -> None:
        try:
            await self.start()
        except ConfigError as error:
            if isinstance(error.__cause__, ActorDiedError):
                # Ray has given up on it and will not restart it
                self._actor = self._make_actor()
            if not isinstance(error.__cause__, RayError) or isinstance(error.__cause__, ActorDiedError):
                log.warning("%s", error)

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Let the worker drain for at most `drain_s` seconds or until `hurry` is set, then end it, and its actor."""
        if self.address:
            stopping = asyncio.create_task(self._stop(drain_s))
            await first_done(asyncio.shield(stopping), hurry.wait(), timeout_s=drain_s + HURRY_S)
            if not stopping.done():
                await first_done(self._hurry(), timeout_s=HURRY_S)
                await first_done(stopping, timeout_s=HURRY_S)
        # an actor that Ray is still restarting has no open requests; a process that is still loading is ended by its lifeline
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)
        if self._answers:
            await asyncio.wait(self._answers, timeout=HURRY_S)

    async def _stop(self, drain_s: float) -> None:
        with contextlib.suppress(RayError):
            await self._result(self._actor.stop.remote(drain_s))

    async def _hurry(self) -> None:
        with contextlib.suppress(RayError):
            await self._result(self._actor.hurry.remote())
