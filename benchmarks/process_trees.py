"""Stop and continue whole process trees, so that in a comparison only the measured side runs."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import psutil


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes and all their descendants; those that have ended are left out."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def running(pids: Iterable[int]) -> AbstractContextManager[None]:
    """Trees that are stopped outside this block. vLLM's idle workers spin and would take half of each core."""
    return _signalled(pids, signal.SIGCONT, signal.SIGSTOP)


def stopped(pids: Iterable[int]) -> AbstractContextManager[None]:
    """Trees that run in blocks of `running` alone, and again behind this block."""
    return _signalled(pids, signal.SIGSTOP, signal.SIGCONT)


@contextmanager
def _signalled(pids: Iterable[int], before: signal.Signals, after: signal.Signals) -> Iterator[None]:
    pids = list(pids)
    send(pids, before)
    try:
        yield
    finally:
        send(pids, after)


def resident_mib(pid: int) -> float:
    """MiB of main memory that a tree occupies now; pages of files and pages that processes share count in each."""
    root = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (root, *root.children(recursive=True))) / 2**20


def end(pids: Iterable[int]) -> None:
    """Kill trees, stopped or not."""
    send(pids, signal.SIGKILL)
