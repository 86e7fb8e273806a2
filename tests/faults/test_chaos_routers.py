"""Two routers over the same workers: one is killed, stopped and drained at random moments, the other's clients see nothing
of it, and what the first had begun is given back.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes.cluster_processes import Service, running_cluster
from tests.support.processes.inference_client import InferenceClient

from .chaos_load import ALL_REMOTE, FLAGS, Load
from .prepared_worker import PREPARED_WORKER
from .worker_faults import WORKERS, check_whole, role_of

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

NUM_LIVES = 10


async def end(router: Service, draw: random.Random) -> None:
    """One of the ways in which a router goes."""
    way = draw.choice(("SIGKILL", "SIGSTOP", "SIGTERM"))
    if way == "SIGSTOP":  # its workers give it up, or not; it finds them again before it dies, or not
        router.signal(signal.SIGSTOP)
        await asyncio.sleep(draw.choice((0.3, 1.2, 3.0)))
        router.signal(signal.SIGCONT)
        await asyncio.sleep(draw.uniform(0.0, 1.0))
    router.signal(signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)


@pytest.mark.parametrize(
    ("connector", "placement", "seed"), [("tcp", (), 1), ("tcp", ALL_REMOTE, 2), ("nixl", ALL_REMOTE, 3)]
)
async def test_i4_a_router_that_goes_disturbs_no_other(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, connector: str, placement: tuple[str, ...], seed: int
) -> None:
    model = str(tiny_checkpoints("llama", num_hidden_layers=4))
    draw = random.Random(seed)
    sessions = placement != ALL_REMOTE
    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        for name in WORKERS:
            flags = ("--model", model, *FLAGS, f"--connector={connector}")
            addresses[role_of(name)].append(cluster.start_worker(role_of(name), *flags, name=name).address)

        def start(name: str) -> Service:
            return cluster.start_router("--model", model, *placement, **addresses, name=name)

        async with InferenceClient(start("router").address) as client:
            load = Load(client, seed, num_clients=5, sessions=sessions)
            await load.learn()
            load.begin()
            for life in range(NUM_LIVES):
                mortal = await asyncio.to_thread(start, f"router-{life}")
                async with InferenceClient(mortal.address) as other:
                    others = Load(other, seed + life, sessions=sessions)
                    others.expected = load.expected
                    others.begin()
                    await asyncio.sleep(draw.uniform(0.5, 2.5))
                    await end(mortal, draw)
                    await others.abandon()
                await asyncio.to_thread(mortal.process.wait, 40)
                await load.answered()
            await load.end()
        assert load.num_answers > 10 * NUM_LIVES
        assert not load.num_lost
        check_whole(cluster)
