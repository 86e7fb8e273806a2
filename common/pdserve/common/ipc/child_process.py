"""`ChildProcess`: a Python program of the engine in a process of its own, which inherits one end of a socket pair."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol


class ChildProcess(Protocol):
    """The part of `subprocess.Popen` that is used."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


StartProcess = Callable[[int], ChildProcess]
"""Starts a program with a descriptor, which it inherits."""


def start_module(module: str, descriptor: int) -> ChildProcess:
    """Run a module whose only argument is the number of the descriptor."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(descriptor)], stdin=subprocess.DEVNULL, pass_fds=(descriptor,)
    )


def wait_for_exit(process: ChildProcess, timeout: float) -> int:
    """How a process ended, as `ChildProcess.wait` returns it, without reaping it. timeout: seconds.

    Linux 6.18.44 has taken 40 s to reap a process next to busy loops (docs/failure.md), and until then `wait` does not end, even
    after its timeout.
    Raises: subprocess.TimeoutExpired.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(1000 * timeout)
        finally:
            os.close(descriptor)
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ProcessLookupError, ChildProcessError):  # it was reaped before: `process` has the status
        return process.wait(timeout)
    if found is None:
        raise subprocess.TimeoutExpired(str(process.pid), timeout)
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def exit_text(status: int) -> str:
    """How a process ended. status: negative for a signal."""
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
