"""`WorkerChild`: starts one worker process of `pdserve up`, watches it, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pdserve.cli.up.child_report import FailedReport, LoadReport, ReadyReport, read_report
from pdserve.cli.up.cluster_plan import ChildPlan
from pdserve.common.address.host_address import host_and_port
from pdserve.common.errors import ConfigError
from pdserve.common.processes.service_process import ServiceProcess, start_process

log = logging.getLogger(__name__)

RESTART_AFTER_S = 1.0


class WorkerChild:
    """One worker process. `start` waits until it is ready; `watch` then restarts it at the same address."""

    def __init__(self, plan: ChildPlan, model: Path | str, metrics_port: int) -> None:
        """model: its folder, or another name of it that the worker resolves."""
        self.plan = plan
        self.address = ""
        self.metrics = host_and_port(plan.settings.metrics_at, metrics_port)
        """host:port of `/metrics`."""
        self._flags = ("--model", str(model), "--metrics-port", str(metrics_port))
        self.on_load: Callable[[str, LoadReport], None] = lambda name, load: None
        """Called with the worker's name and the report while weights load."""
        self.ready_at: float | None = None
        """`time.monotonic()` when it was ready; None while it starts, or waits to be started again."""
        self._process: ServiceProcess | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process. Raises: ConfigError if it ends before it is ready, with the cause if it reported one."""
        report_read, report_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        command = [
            sys.executable, "-m", "pdserve.cli.main", self.plan.role, *self.plan.flags, *self._flags, *self._same_port(),
            "--report-fd", str(report_write), "--lifeline-fd", str(lifeline_read),
        ]  # fmt: skip
        try:
            self._process = await start_process(
                command, pass_fds=(report_write, lifeline_read), environ=self.plan.environ
            )
        finally:
            os.close(report_write)
            os.close(lifeline_read)
        self._lifeline = lifeline_write
        report = await self._read_reports(report_read)
        if not isinstance(report, ReadyReport):
            code = await self._process.wait()
            self._cut_lifeline()
            if report is not None:
                raise ConfigError(f"{self.plan.name}: {report.message}")
            raise ConfigError(f"{self.plan.name} ended with status {code} before it was ready")
        self.address = report.address
        self.ready_at = time.monotonic()

    def _same_port(self) -> Sequence[str]:
        # always set: a port in the environment is for one service, not for all children
        return ("--port", self.address.rpartition(":")[2] or "0")

    async def _read_reports(self, descriptor: int) -> ReadyReport | FailedReport | None:
        """The address or failure that the child reported; None if it ended without either."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
        )
        try:
            while line := await reader.readline():
                with contextlib.suppress(msgspec.MsgspecError):
                    report = read_report(line)
                    if isinstance(report, ReadyReport | FailedReport):
                        return report
                    self.on_load(self.plan.name, report)
            return None
        finally:
            transport.close()

    async def ended(self) -> int:
        """Wait until the process that `start` started has ended; returns its status."""
        assert self._process is not None
        code = await self._process.wait()
        self.ready_at = None
        self._cut_lifeline()
        return code

    async def watch(self) -> None:
        """Restart the process whenever it ends; runs until cancelled."""
        while True:
            if self._process is not None:
                code = await self.ended()
                log.warning("%s ended with status %d; restarting", self.plan.name, code)
            await asyncio.sleep(RESTART_AFTER_S)
            try:
                await self.start()
                log.warning("%s is back at %s", self.plan.name, self.address)
            except ConfigError as error:
                log.warning("%s", error)
                self._process = None

    async def stop(self, drain_s: float, hurry: asyncio.Event) -> None:
        """Let the process drain for at most `drain_s` seconds or until `hurry` is set, then end it."""
        if self._process is not None:
            await self._process.stop(self.plan.name, drain_s, hurry)
        # not earlier: its end is a signal of its own, and a second one cuts the drain short
        self._cut_lifeline()

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
