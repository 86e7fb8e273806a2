"""Prompts that took workers down with them: refused for a while, so that one of them cannot kill a fleet."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.common.errors import WorkerLost
from pdserve.router.attempt_failure import AttemptFailed
from pdserve.router.fleet import Fleet
from pdserve.router.placement import WorkerKey
from pdserve.router.worker import Worker

REFUSED_S = 60.0
DEATHS = 2
"""So many workers must have died under one request after they had admitted it."""
DEATHS_UNHEARD = 3
"""Or so many in all."""
_MAX_ENTRIES = 4096


class PoisonList:
    """Digests of refused requests, each with the time until which it is, and whether what it is refused for still holds."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[float, Callable[[], bool]]] = {}

    def add(self, request_digest: bytes, holds: Callable[[], bool]) -> None:
        """holds: asked each time that somebody asks the same again; False ends it early."""
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.pop(next(iter(self._entries)))
        self._entries[request_digest] = time.monotonic() + REFUSED_S, holds

    def check(self, request_digest: bytes) -> None:
        """Raises: WorkerLost for a digest that is refused."""
        if request_digest not in self._entries:
            return
        until, holds = self._entries[request_digest]
        left = until - time.monotonic()
        if left <= 0 or not holds():
            del self._entries[request_digest]
            return
        text = f"workers died while they served this prompt; it is refused for another {left:.0f} s"
        raise WorkerLost(text).for_clients()


class Casualties:
    """The workers that died under one request.

    One that had not admitted it weighs less: where several workers go at once, for a reason of their own, a request may be
    sent to one of them before anybody has missed it. One that comes back in the same life had not died: a connection
    had, unless its engine stood still.
    """

    def __init__(self, poison: PoisonList, fleet: Fleet) -> None:
        self._poison = poison
        self._fleet = fleet
        self._lost: dict[WorkerKey, Worker] = {}
        self._admitted: set[WorkerKey] = set()

    @property
    def workers(self) -> set[WorkerKey]:
        """Those that have not come back."""
        return {key for key, worker in self._lost.items() if not self._fleet.came_back(worker)}

    def count(self, failure: AttemptFailed, prompt_digest: bytes) -> None:
        """An attempt has failed. Raises: WorkerLost when the prompt has been one worker's death too many; it is refused."""
        if not failure.died or failure.blamed is None:
            return
        self._lost[failure.blamed.key] = failure.blamed
        if not failure.unheard:
            self._admitted.add(failure.blamed.key)
        if self._are_too_many():
            self._poison.add(prompt_digest, self._are_too_many)
            text = f"{len(self._dead)} workers died while they served this request"
            raise WorkerLost(text).for_clients() from failure

    @property
    def _dead(self) -> set[WorkerKey]:
        """Those that count: an engine that stood still and moves again may serve, but the prompt may have stopped it."""
        return self.workers | {key for key, worker in self._lost.items() if worker.stood_still}

    def _are_too_many(self) -> bool:
        dead = self._dead
        return len(dead & self._admitted) >= DEATHS or len(dead) >= DEATHS_UNHEARD
