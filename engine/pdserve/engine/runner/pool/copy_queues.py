"""`CopyQueues`: where the copies between tiers run, next to the engine's steps, and where their ends wait for the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pdserve.common import clock
from pdserve.engine.scheduler_output import CopyEnd, LookupEnd

CLOSE_S = 5.0
"""Seconds that a call of the store may take after the end of its engine, before the engine is closed without it."""


class CopyQueues(Protocol):
    """Work of one queue runs in the order in which it was put there, next to that of the others."""

    def put(self, name: str, work: Callable[[], object]) -> None:
        """Run `work` after what was put into this queue before. What it raises is raised by `take`."""

    def end(self, end: CopyEnd | LookupEnd) -> None:
        """Report an end; called by work."""

    def take(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        """Ends since the last call; waits at most `timeout_s` seconds for the first. Raises: the exception of work."""

    def close(self) -> None:
        """End the queues, after what each of them runs; what was put there besides is dropped. May be called again."""


class ThreadQueues:
    """Implements `CopyQueues`: a thread per queue."""

    def __init__(self, names: Sequence[str]) -> None:
        self._work = {name: queue.SimpleQueue[Callable[[], object] | None]() for name in names}
        self._ended: queue.SimpleQueue[CopyEnd | LookupEnd | Exception] = queue.SimpleQueue()
        self._is_closing = False
        self._threads = [threading.Thread(target=self._run, args=(name,), name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def put(self, name: str, work: Callable[[], object]) -> None:
        self._work[name].put(work)

    def end(self, end: CopyEnd | LookupEnd) -> None:
        self._ended.put(end)

    def take(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        ended: list[CopyEnd | LookupEnd] = []
        while True:
            try:
                end = self._ended.get(timeout=timeout_s) if timeout_s and not ended else self._ended.get_nowait()
            except queue.Empty:
                return ended
            if isinstance(end, Exception):
                raise end
            ended.append(end)

    def close(self) -> None:
        """As of `CopyQueues`. A call of the store that does not return is left to itself."""
        self._is_closing = True
        for work in self._work.values():
            work.put(None)
        end_at = clock.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_at - clock.monotonic()))

    @torch.inference_mode()
    def _run(self, name: str) -> None:
        while (work := self._work[name].get()) is not None and not self._is_closing:
            try:
                work()
            except Exception as error:
                self._ended.put(error)
