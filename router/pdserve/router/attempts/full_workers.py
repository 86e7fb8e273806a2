"""`FullWorkers`: workers that refused a request because they were full, so that it goes elsewhere."""

from __future__ import annotations

import asyncio
import time

from pdserve.common.errors import PdServeError
from pdserve.router.attempts.attempt_failure import backoff_s
from pdserve.router.placement.placement import WorkerKey
from pdserve.router.workers.worker import Worker


class FullWorkers:
    """One per request. A refusal is not a failed attempt: nothing was started, and the worker is alive."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: seconds after the first refusal for which a request still looks for a worker."""
        self.keys: frozenset[WorkerKey] = frozenset()
        """Workers to avoid while there is another."""
        self._patience_s = patience_s
        self._first_s: float | None = None
        self._num_rounds = 0

    async def refused(self, worker: Worker, error: PdServeError) -> None:
        """Wait before the next try, if every other way has been tried. Raises: the error, when patience is over."""
        now = time.monotonic()
        self._first_s = now if self._first_s is None else self._first_s
        if now - self._first_s >= self._patience_s:
            raise error
        if worker.key not in self.keys:
            self.keys |= {worker.key}
            return
        # it was taken again, so there is no other: a new round
        self._num_rounds += 1
        self.keys = frozenset()
        await asyncio.sleep(min(backoff_s(self._num_rounds), self._first_s + self._patience_s - now))
