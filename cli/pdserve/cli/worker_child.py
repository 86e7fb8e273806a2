"""`WorkerChild`: one worker process of `pdserve up`, started, watched, started again when it dies."""

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
    """`start` waits until it is ready; from then on `watch` keeps it alive at the same address."""

    def __init__(self, plan: ChildPlan, on_load: Callable[[str, LoadReport], None]) -> None:
        self.plan = plan
        self.address = ""
        self.on_load = on_load
        """Called while weights load, with the worker's name and the report."""
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises: ConfigError when the process ends before it is ready, with the cause that it reported, if any."""
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
                start_new_session=True,  # a terminal's Ctrl-C is for the parent, which drains its children in order
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
        # always given: a port in the environment is meant for one service, not for all children
        return ("--port", self.address.rpartition(":")[2] or "0")

    async def _read_reports(self, descriptor: int) -> ReadyReport | FailedReport | None:
        """The result of the start; None for a process that ended without a report."""
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
        """Start it again whenever it ends; runs until cancelled."""
        while True:
            if self._process is not None:
                code = await self._process.wait()
                self._cut_lifeline()
                log.warning("%s ended with status %d; it is started again", self.plan.name, code)
            await asyncio.sleep(RESTART_AFTER_S)
            try:
                await self.start()
                log.warning("%s is back at %s", self.plan.name, self.address)
            except ConfigError as error:
                log.warning("%s", error)
                self._process = None

    async def stop(self, drain_s: float) -> None:
        """Let it drain, at most `drain_s`; then kill it."""
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
            log.warning("%s did not drain in %.0f s and is killed", self.plan.name, drain_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
