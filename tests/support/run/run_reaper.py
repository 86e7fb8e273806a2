"""A pytest plugin: whatever a run of tests starts ends with it, however the run ends.

A process that outlives the run, in a session of its own, waits for the end of a pipe and then kills all processes that have the
run's mark in their environment. SIGTERM ends a run as Ctrl-C does, with a summary of what failed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "RUN_OF_TESTS"
"""Variable that every process of a run inherits."""
_SCANS = 5
_SCAN_S = 0.2
_KEPT: list[tuple[int, subprocess.Popen[bytes]]] = []
"""The writing end of the pipe, open as long as this process lives, and the process that waits for its end."""


def pytest_configure() -> None:
    """Called in each process of a run."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mark = f"{MARK}={secrets.token_hex(8)}"
    os.environ[MARK] = mark.partition("=")[2]
    read, write = os.pipe()
    reaper = subprocess.Popen(
        [sys.executable, "-S", __file__, mark], stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    os.close(read)
    _KEPT.append((write, reaper))


def marked(mark: bytes) -> list[int]:
    """Processes with the mark, without this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                # it has ended, or is another user's
                continue
            if mark in variables:
                found.append(int(folder.name))
    return found


def reap(mark: bytes) -> None:
    """Kill what has the mark, until nothing has started anything more."""
    for _ in range(_SCANS):
        for process in marked(mark):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_SCAN_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    reap(sys.argv[1].encode())
