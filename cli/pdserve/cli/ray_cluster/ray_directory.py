"""`RayDirectory`: gives a router the addresses of workers that Ray moves from node to node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.fleet import Discovery

if TYPE_CHECKING:
    from pdserve.cli.ray_cluster.ray_worker import RayWorker

LOOK_S = 0.25


class RayDirectory:
    """The router's `Directory` where Redis is not used: lists the workers that this driver started on Ray."""

    def __init__(self, workers: Sequence[RayWorker]) -> None:
        self._workers = workers

    async def run(self, fleet: Discovery) -> None:
        """Register the workers' current addresses, and forget those that they have left."""
        while True:
            found = {worker.address: WorkerRole(worker.plan.role) for worker in self._workers if worker.address}
            for address, role in found.items():
                fleet.register(address, role)
            fleet.forget([address for address in fleet.introduced() if address not in found])
            await asyncio.sleep(LOOK_S)
