"""Reports of a child process of `pdserve up` to its parent: JSON lines on a pipe, and a second pipe that detects the parent's end.

child -> parent   {"type": "load", "loaded_bytes": .., "total_bytes": ..} while weights load,
                  {"type": "ready", "worker_id": .., "address": ..} when ready,
                  {"type": "failed", "message": ..} when it cannot start: printed by the parent, not by the child
parent -> child   nothing; the pipe is closed when the parent ends, and the child then drains
"""

from __future__ import annotations

import os
import signal
import threading

import msgspec


class LoadReport(msgspec.Struct, forbid_unknown_fields=True, tag="load"):
    loaded_bytes: int
    total_bytes: int


class ReadyReport(msgspec.Struct, forbid_unknown_fields=True, tag="ready"):
    worker_id: str
    address: str


class FailedReport(msgspec.Struct, forbid_unknown_fields=True, tag="failed"):
    """The reason why the service does not start."""

    message: str


Report = LoadReport | ReadyReport | FailedReport
MAX_MESSAGE_CHARS = 4096
"""Limit of a message: a report is one line, and the parent reads at most 64 KiB of a line."""


class ReportPipe:
    """The child's end of the pipe for reports."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_open(self) -> bool:
        """False if there is no parent, or if a `send` has found that it ended."""
        return self._descriptor is not None

    def send(self, report: Report) -> None:
        """Write one line; no effect if the parent has ended."""
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, msgspec.json.encode(report) + b"\n")
            except OSError:
                self._descriptor = None


def read_report(line: bytes) -> Report:
    """The report in a line. Raises: msgspec.ValidationError for anything else."""
    report: Report = msgspec.json.decode(line, type=Report)
    return report


def follow_lifeline(descriptor: int | None) -> None:
    """Drain this process when the parent's end of the pipe closes, however the parent died."""
    if descriptor is None:
        return

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
