"""Workers that are killed, drained and stopped, until they serve again; and how they must be found in the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress

import psutil

from tests.support.processes.cluster_processes import Cluster, Service
from tests.support.processes.prepared_children import ENGINE_PROCESS, RANK_1
from tests.support.run.waiting import HANG_S

WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
WAYS = ("SIGKILL", "SIGTERM", "SIGSTOP")
PART_KILLED, PART_STOPPED = "SIGKILL of a part", "SIGSTOP of a part"
"""Kill or stop a process of a worker's engine, or of its rank 1, alone; a worker that loses one ends by itself."""
_PARTS = (ENGINE_PROCESS, RANK_1)


def role_of(worker: str) -> str:
    return worker.partition("-")[0]


def parts_of(worker: Service) -> dict[int, str]:
    """Process id -> name, of the worker's processes beside the first that belong to its engine."""
    found = {}
    for child in psutil.Process(worker.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # processes of grammars come and go
            if (name := child.name()) in _PARTS:
                found[child.pid] = name
    return found


async def hurt(cluster: Cluster, victim: Service, way: str, draw: random.Random) -> None:
    """One fault, until the victim serves again."""
    target = draw.choice(sorted(parts_of(victim))) if way in (PART_KILLED, PART_STOPPED) else victim.process.pid
    if way in ("SIGSTOP", PART_STOPPED):
        os.kill(target, signal.SIGSTOP)
        await asyncio.sleep(draw.choice((0.02, 0.3, 1.2, 3.0)))
        os.kill(target, signal.SIGCONT)
        return
    os.kill(target, signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)
    code = await asyncio.to_thread(victim.process.wait, HANG_S)
    assert code == {"SIGKILL": -signal.SIGKILL, PART_KILLED: 1}.get(way, 0), victim.read_log()
    await asyncio.to_thread(cluster.restart, victim.name)


def check_whole(cluster: Cluster) -> None:
    """Every worker has all its blocks back, none of them in quarantine, and nobody has met what it did not expect."""
    cluster.check_pools()
    for service in cluster.services.values():
        if service.role != "router":
            assert cluster.load(service).blocks_quarantined == 0
    cluster.check_logs()
