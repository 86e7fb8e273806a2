"""`ChildProcess`: a Python program of the engine in a process of its own, which inherits one end of a socket pair."""

from __future__ import annotations

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


def exit_text(status: int) -> str:
    """How a process ended. status: negative for a signal."""
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
