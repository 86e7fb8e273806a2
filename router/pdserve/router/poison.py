"""Prompts that took workers down with them: refused for a while, so that one of them cannot kill a fleet."""

from __future__ import annotations

import time

from pdserve.common.errors import WorkerLost

REFUSED_S = 60.0
DEATHS = 2
"""So many workers must have died under one request."""
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
        raise WorkerLost(f"{DEATHS} workers died while they served this prompt; it is refused for another {left:.0f} s")
