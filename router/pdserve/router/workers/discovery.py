"""`Discovery` and `Directory`: the interface by which a directory announces workers and their blocks to a router.

Without a directory, addresses come from settings and blocks over each worker's watch; `RedisDirectory` is a directory. Both
ways pass one contract suite.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pdserve.router.workers.worker import Worker, WorkerRole


class Discovery(Protocol):
    """The operations that a directory uses: the router's `Fleet`."""

    def register(self, address: str, role: WorkerRole) -> None:
        """A worker can be found there. Idempotent; an address from settings, or with a living worker, keeps its role."""

    def forget(self, missing: Collection[str]) -> None:
        """Records no longer name these addresses: forget those without a live worker."""

    def introduced(self) -> Sequence[str]:
        """The addresses that are here by introduction alone."""

    def lives(self) -> Sequence[Worker]:
        """Every worker whose watch is up, one entry per epoch."""


class Directory(Protocol):
    """Runs beside a fleet."""

    async def run(self, fleet: Discovery) -> None:
        """Introduce workers, and keep the index true to what the living ones hold, until cancelled."""
