"""The interface of what introduces workers to a router and tells it which blocks they hold.

Without one, addresses come from settings and blocks over each worker's watch; `RedisDirectory` is the other way. Both
pass one contract suite.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pdserve.router.workers.worker import Worker, WorkerRole


class Discovery(Protocol):
    """What a directory tells and asks: the router's `Fleet`."""

    def register(self, address: str, role: WorkerRole) -> None:
        """A worker can be found there. Idempotent; an address from settings, or with a living worker, keeps its role."""

    def forget(self, missing: Collection[str]) -> None:
        """Of these addresses nobody speaks any more: those without a living worker are given up."""

    def introduced(self) -> Sequence[str]:
        """The addresses that are here by introduction alone."""

    def lives(self) -> Sequence[Worker]:
        """Every worker whose watch is up, one entry a life."""


class Directory(Protocol):
    """Runs beside a fleet."""

    async def run(self, fleet: Discovery) -> None:
        """Introduce workers, and keep the index true to what the living ones hold, until cancelled."""
