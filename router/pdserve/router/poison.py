"""Prompts that took workers down with them: refused for a while, so that one of them cannot kill a fleet."""

from __future__ import annotations

import time

from pdserve.common.errors import WorkerLost
from pdserve.router.attempt_failure import AttemptFailed
from pdserve.router.placement import WorkerKey
from pdserve.router.worker import Worker

REFUSED_S = 60.0
DEATHS = 2
"""So many workers must have died under one request after they had admitted it."""
DEATHS_UNHEARD = 3
"""Or so many in all."""
_MAX_ENTRIES = 4096


class PoisonList:
    """Digests of refused requests, each with the time until which it is."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    def add(self, request_digest: bytes) -> None:
        if len(self._until) >= _MAX_ENTRIES:
            self._until.pop(next(iter(self._until)))
        self._until[request_digest] = time.monotonic() + REFUSED_S

    def check(self, request_digest: bytes) -> None:
        """Raises: WorkerLost for a digest that is refused."""
        until = self._until.get(request_digest)
        if until is None:
            return
        left = until - time.monotonic()
        if left <= 0:
            del self._until[request_digest]
            return
        raise WorkerLost(f"workers died while they served this prompt; it is refused for another {left:.0f} s")


class Casualties:
    """The workers that died under one request.

    One that had not admitted it weighs less: where several workers go at once, for a reason of their own, a request may be
    sent to one of them before anybody has missed it.
    """

    def __init__(self, poison: PoisonList) -> None:
        self._poison = poison
        self._admitted: set[WorkerKey] = set()
        self._died: set[WorkerKey] = set()
        self.workers: set[Worker] = set()
        """As the fleet knew them. One that only stood still and is back is another `Worker` there, and may serve it."""

    def count(self, failure: AttemptFailed, prompt_digest: bytes) -> None:
        """An attempt has failed. Raises: WorkerLost when the prompt has been one worker's death too many; it is refused."""
        if not failure.died or failure.blamed is None:
            return
        self.workers.add(failure.blamed)
        self._died.add(failure.blamed.key)
        if not failure.unheard:
            self._admitted.add(failure.blamed.key)
        if len(self._admitted) >= DEATHS or len(self._died) >= DEATHS_UNHEARD:
            self._poison.add(prompt_digest)
            raise WorkerLost(
                f"{len(self._died)} workers died while they served this request; last: {failure.error.message}"
            ) from failure
