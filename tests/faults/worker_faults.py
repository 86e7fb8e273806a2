"""Workers that are killed, drained and stopped, until they serve again; and how they must be found in the end."""

from __future__ import annotations

import asyncio
import random
import signal

from tests.support.cluster_processes import Cluster, Service
from tests.support.waiting import HANG_S

WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
WAYS = ("SIGKILL", "SIGTERM", "SIGSTOP")


def role_of(worker: str) -> str:
    return worker.partition("-")[0]


async def hurt(cluster: Cluster, victim: Service, way: str, draw: random.Random) -> None:
    """One fault, until the victim serves again."""
    if way == "SIGSTOP":
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(draw.choice((0.02, 0.3, 1.2, 3.0)))
        victim.signal(signal.SIGCONT)
        return
    victim.signal(signal.SIGKILL if way == "SIGKILL" else signal.SIGTERM)
    code = await asyncio.to_thread(victim.process.wait, HANG_S)
    assert code == (-signal.SIGKILL if way == "SIGKILL" else 0), victim.read_log()
    await asyncio.to_thread(cluster.restart, victim.name)


def check_whole(cluster: Cluster) -> None:
    """Every worker has all its blocks back, none of them in quarantine, and nobody has met what it did not expect."""
    cluster.check_pools()
    for service in cluster.services.values():
        if service.role != "router":
            assert cluster.load(service).blocks_quarantined == 0
    cluster.check_logs()
