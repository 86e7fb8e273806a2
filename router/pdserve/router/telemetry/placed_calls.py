"""`PlacedCalls`: how many calls each worker was given, without a series for every worker that there ever was."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import Counter

from pdserve.router.workers.worker import Worker, WorkerState

KEPT_S = 600.0
"""Seconds for which a dead worker's series remains after its last call, so that some scrapes see its last value."""


class PlacedCalls:
    """Counts into a metric with the labels role and worker."""

    def __init__(self, counter: Counter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._last: dict[tuple[str, str], tuple[Worker, float]] = {}
        """Series -> the epoch of the worker that had its last call, and the time of that call."""

    def add(self, role: str, worker: Worker) -> None:
        """A call was placed there."""
        series, now = (role, worker.identity.worker_id), self._clock()
        if series not in self._last:
            self._forget(now)
        self._last[series] = worker, now
        self._counter.labels(*series).inc()

    def _forget(self, now: float) -> None:
        for series, (worker, placed_at) in list(self._last.items()):
            if worker.state is WorkerState.DEAD and now - placed_at > KEPT_S:
                del self._last[series]
                self._counter.remove(*series)
