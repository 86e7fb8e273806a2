"""`WorkerChild`: starts one worker process of `pdserve up`, watches it, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.cli.child_report import FailedReport, LoadReport, ReadyReport, read_report
from pdserve.common.errors import ConfigError

log = logging.getLogger(__name__)

RESTART_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """Arguments of a worker process."""

    role: str
    name: str
    flags: tuple[str, ...]
    environ: dict[str, str]


class WorkerChild:
    """One worker process. `start` waits until it is ready; `watch` then restarts it at the same address."""

    def __init__(self, plan: ChildPlan, on_load: Callable[[str, LoadReport], None]) -> None:
        self.plan = plan
        self.address = ""
        self.on_load = on_load
        """Called with the worker's name and the report while weights load."""
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process. Raises: ConfigError if it ends before it is ready, with the cause if it reported one."""
        report_read, report_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        command = [
            sys.executable, "-m", "pdserve.cli.main", self.plan.role, *self.plan.flags, *self._same_port(),
            "--report-fd", str(report_write), "--lifeline-fd", str(lifeline_read),
        ]  # fmt: skip
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=(report_write, lifeline_read),
                env=self.plan.environ,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # the parent gets a terminal's Ctrl-C and drains its children in order
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

    async def watch(self) -> None:
        """Restart the process whenever it ends; runs until cancelled."""
        while True:
            if self._process is not None:
                code = await self._process.wait()
                self._cut_lifeline()
                log.warning("%s ended with status %d; restarting", self.plan.name, code)
            await asyncio.sleep(RESTART_AFTER_S)
            try:
                await self.start()
                log.warning("%s is back at %s", self.plan.name, self.address)
            except ConfigError as error:
                log.warning("%s", error)
                self._process = None

    async def stop(self, drain_s: float) -> None:
        """Let the process drain for at most `drain_s` seconds, then kill it."""
        process = self._process
        self._cut_lifeline()
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(drain_s):
                await process.wait()
        except TimeoutError:
            log.warning("%s did not drain in %.0f s; killing it", self.plan.name, drain_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
