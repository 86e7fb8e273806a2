"""Failures of an attempt, and workers that refused it."""

from __future__ import annotations

import asyncio
import random

from pdserve.common import clock
from pdserve.common.errors import Overloaded, PdServeError
from pdserve.common.kv_events import WorkerKey
from pdserve.router.workers.worker import RemoteWorker

BACKOFF_S = 0.02
"""Seconds before the second attempt; doubles with each further one, with jitter."""
LONGEST_BACKOFF_S = 1.0
_MAX_DOUBLINGS = 16


def backoff_s(num_failed: int) -> float:
    """Seconds to wait before the next attempt. num_failed: failed attempts, at least 1."""
    return min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0 ** min(_MAX_DOUBLINGS, num_failed - 1)) * random.uniform(0.5, 1.5)


class AttemptFailed(Exception):
    """The reason why an attempt failed, and the worker that caused it."""

    def __init__(
        self,
        error: PdServeError,
        blamed: RemoteWorker | None = None,
        *,
        died: bool = False,
        never_admitted: bool = False,
        in_transfer: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.blamed = blamed
        self.died = died
        """True if the blamed worker, or its connection, is lost."""
        self.never_admitted = never_admitted
        """True if that worker had not admitted the request; it was most likely lost for another reason."""
        self.in_transfer = in_transfer
        """True if the transfer of the prompt's KV failed; the settings decide how to retry."""

    @property
    def refused_by(self) -> RemoteWorker | None:
        """The worker that was full and did not start; None for any other failure."""
        return self.blamed if isinstance(self.error, Overloaded) and self.error.by_peer else None


class PrefillNeeded(Exception):
    """The decode worker did nothing, because too much of the prompt is uncached there."""

    def __init__(self, uncached_tokens: int) -> None:
        super().__init__(f"{uncached_tokens} tokens are uncached")
        self.uncached_tokens = uncached_tokens


class FullWorkers:
    """The full workers of one request. A refusal is not a failed attempt: nothing was started, and the worker is alive."""

    def __init__(self, patience_s: float) -> None:
        """patience_s: seconds after the first refusal for which other workers are tried."""
        self.keys: frozenset[WorkerKey] = frozenset()
        """Workers to avoid while there is another."""
        self._patience_s = patience_s
        self._first_s: float | None = None
        self._num_rounds = 0

    async def refused(self, worker: RemoteWorker, error: PdServeError) -> None:
        """Record a refusal; wait if all workers have been tried. Raises: the error, after `patience_s`."""
        now = clock.monotonic()
        self._first_s = now if self._first_s is None else self._first_s
        if now - self._first_s >= self._patience_s:
            raise error
        if worker.key not in self.keys:
            self.keys |= {worker.key}
            return
        # the same worker was chosen again, so there is no other; start a new round
        self._num_rounds += 1
        self.keys = frozenset()
        await asyncio.sleep(min(backoff_s(self._num_rounds), self._first_s + self._patience_s - now))
