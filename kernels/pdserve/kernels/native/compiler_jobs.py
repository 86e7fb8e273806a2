"""`run_jobs`: compilers, as many at a time as processors and free memory allow; none outlives this process's wait for it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pdserve.kernels.cpu.free_memory import free_memory

BYTES_PER_JOB = 600 << 20
"""Memory of the compiler of the largest source, and of its optimizer."""
TIMEOUT_S = 600.0
"""Seconds that one compiler may take."""
_LOOK_S = 0.02
_SHOWN_CHARS = 4000


class JobError(Exception):
    """A command failed, or cannot be run."""


class JobTimeout(JobError):
    """A command took longer than `TIMEOUT_S`."""


class _Job:
    """A running command, in a process group of its own with all that it starts."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        self.command = command
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._give_up_at = time.monotonic() + TIMEOUT_S

    def has_ended(self) -> bool:
        """Raises: JobError if it failed, or has taken too long."""
        status = self._process.poll()
        if status is None:
            if time.monotonic() > self._give_up_at:
                raise JobTimeout(f"{shlex.join(self.command)} took more than {TIMEOUT_S:g} s")
            return False
        if status:
            said = self._output.read_text(errors="replace")[-_SHOWN_CHARS:]
            raise JobError(f"{shlex.join(self.command)} failed:\n{said}")
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def max_jobs(free_bytes: Callable[[], int | None] | None = None) -> int:
    """Commands at a time, at least 1. free_bytes: free memory, None if it is not known; default: that of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = (free_bytes or _free_bytes)()
    return cores if free is None else max(1, min(cores, free // BYTES_PER_JOB))


def _free_bytes() -> int | None:
    free = free_memory()
    return None if free is None else free.num_bytes


def run_jobs(commands: Sequence[Sequence[str]], folder: Path, at_once: int | None = None) -> None:
    """Run all commands; they end with this call, also if it is interrupted or this process gets SIGTERM.

    folder: for their output. at_once: commands at a time; default: `max_jobs`.
    Raises: JobError with the output of the first that fails; then the others are killed.
    """
    at_once = at_once or max_jobs()
    running: list[_Job] = []
    with _signals() as received:
        try:
            for number, command in enumerate(commands):
                while len(running) >= at_once:
                    running = _still_running(running, received)
                running.append(_Job(command, folder / f"{number}.output"))
            while running:
                running = _still_running(running, received)
        except OSError as error:
            raise JobError(f"the compiler cannot be run: {error}") from error
        finally:
            for job in running:
                job.kill()


def _still_running(jobs: list[_Job], received: Sequence[int]) -> list[_Job]:
    """Jobs that have not ended, after a moment's wait. received: signals. Raises: JobError; as the first of the signals asks."""
    time.sleep(_LOOK_S)
    if received:
        raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])
    return [job for job in jobs if not job.has_ended()]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The SIGINT and SIGTERM that arrive inside; an exception at any point could leave a command that was just started."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
