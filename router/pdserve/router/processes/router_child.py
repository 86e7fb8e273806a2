"""`RouterChild`: one router process, as its parent has it; `ProcessStart` is what it needs to begin."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Mapping

import msgspec

from pdserve.common.errors import ConfigError, PdServeError
from pdserve.common.processes.service_process import ServiceProcess, start_process
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.child_admission import ChildAdmission
from pdserve.router.process_link import Handler, ProcessLink
from pdserve.router.requests.router_views import OWN_METRICS
from pdserve.router.telemetry.metric_families import MetricFamilies

log = logging.getLogger(__name__)

START, READY, FAILED = "process.start", "process.ready", "process.failed"
IS_STARTING = "workers.is_starting"
START_S = 120.0
"""Seconds within which a process must listen."""
METRICS_S = 2.0
"""Seconds within which a process must report its metrics; after that its last ones count."""
_PROGRAM = "pdserve.router.router_process"


class ProcessStart(msgspec.Struct, frozen=True):
    """Answer to the call `START`."""

    settings: RouterSettings
    """With the ports that all processes share."""
    model_folder: str
    number: int
    """Counts the processes of a router from 0."""


class RouterChild:
    """`start` it once, then wait until it has `ended`."""

    def __init__(self, start: ProcessStart, admission: Admission, shared: Mapping[str, Handler]) -> None:
        """admission: of all processes. shared: further calls that the parent serves."""
        self.number = start.number
        self.admission = ChildAdmission(admission)
        self.families = MetricFamilies()
        """The last metrics that the process reported."""
        self.is_ready = False
        self.link: ProcessLink | None = None
        self._process: ServiceProcess | None = None
        self._reported: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._handlers = {
            **shared,
            **self.admission.handlers,
            START: Handler(type(None), lambda _: start),
            READY: Handler(type(None), lambda _: self._report(None)),
            FAILED: Handler(str, self._report),
        }

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process and wait until it listens. Raises: ConfigError with its reason, if it does not."""
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        try:
            self._process = await start_process([sys.executable, "-m", _PROGRAM, str(number)], pass_fds=(number,))
        except OSError as error:
            ours.close()
            raise ConfigError(f"a router process cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        self.link = ProcessLink(ours, self._handlers)
        self.link.on_lost = self._lost
        try:
            async with asyncio.timeout(START_S):
                message = await asyncio.shield(self._reported)
        except TimeoutError:
            message = f"it did not listen within {START_S:g} s"
        if message is not None:
            self._kill()
            raise ConfigError(message)
        self.is_ready = True

    async def ended(self) -> int:
        """Wait for the end of the process; then nothing of it counts any more. Returns its status; -1 if it never began."""
        status = await self._process.wait() if self._process is not None else -1
        self.is_ready = False
        if self.link is not None:
            self.link.close()
        self.admission.end()
        return status

    async def fetch_families(self) -> MetricFamilies:
        """The metrics of the process: new ones, or the last ones if it does not answer."""
        if self.link is None or not self.is_ready:
            return self.families.lasting()
        with contextlib.suppress(PdServeError):
            self.families = await self.link.call(OWN_METRICS, None, MetricFamilies, METRICS_S)
        return self.families

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Let the process drain for at most `drain_s` seconds or until `hurry` is set, then end it."""
        if self._process is not None:
            await self._process.stop(f"router process {self.number}", drain_s, hurry)

    def _report(self, message: str | None) -> None:
        if not self._reported.done():
            self._reported.set_result(message)

    def _lost(self) -> None:
        """The process has ended, or cannot be understood."""
        self._report("it ended before it listened")
        self.is_ready = False
        # what it had counts no more for the others, also if its end takes time
        self.admission.end()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
