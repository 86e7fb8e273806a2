"""Reports of a child of `pdserve up` to its parent: JSON lines on a pipe, and a lifeline back.

child -> parent   {"loaded_bytes": .., "total_bytes": .., "name": ..} while weights load, {"address": ..} when ready,
                  {"message": ..} when it cannot start: the parent prints it, and the child does not
parent -> child   nothing; the pipe's end is the parent's end, and the child drains
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
    """Why the service does not start."""

    message: str


Report = LoadReport | ReadyReport | FailedReport
MAX_MESSAGE_CHARS = 4096
"""A report is one line, which the parent reads up to 64 KiB."""


class ReportPipe:
    """The child's end."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_open(self) -> bool:
        """False without a parent, or after it has ended."""
        return self._descriptor is not None

    def send(self, report: Report) -> None:
        """Write one line; an ended parent is not an error here."""
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, msgspec.json.encode(report) + b"\n")
            except OSError:
                self._descriptor = None


def read_report(line: bytes) -> Report:
    """Raises: msgspec.ValidationError for anything that is not a report."""
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
