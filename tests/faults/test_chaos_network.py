"""Faults of the network at random moments under load, between workers and between them and their router: every answer stays
what an undisturbed run gives.

Where there is one worker of each role, it is out of reach only for a while.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient

from .chaos_load import ALL_REMOTE, FLAGS, Load
from .faulty_network import PEERS_HOST, ROUTER_HOST, WORKER_HOST, Link, free_ports
from .prepared_worker import PREPARED_WORKER
from .worker_faults import WORKERS, check_whole, role_of

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

NUM_ROUNDS = 12
SECONDS = (0.3, 1.5, 4.0)
"""Shorter and longer than it takes to notice; the last also longer than a lease's grace."""
MEGABYTE = 1e6
WAYS = ("reset", "reset later", "refuse", "silence", "silent worker", "deaf worker", "slow")
PAIR = ("prefill-1", "decode-1")
LONGEST_OF_PAIR_S = 3.2
"""Also longer than the grace. Requests wait 5 s for the only worker of a role, which must have joined again until then."""


class World:
    """Workers behind links, and a router."""

    def __init__(self, cluster: Cluster, workers: Sequence[str], draw: random.Random) -> None:
        self.workers = workers
        self._cluster = cluster
        self._draw = draw
        self._links: dict[tuple[str, str], Link] = {}
        """(worker, who calls on it): `router`, `peers`, or `readers` of its blocks."""

    async def start(self, stack: AsyncExitStack, model: str, connector: str, placement: Sequence[str]) -> None:
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        for name in self.workers:
            port, data_port = free_ports(2, (WORKER_HOST, PEERS_HOST, ROUTER_HOST), self._draw)
            for who, host, at in (
                ("router", ROUTER_HOST, port),
                ("peers", PEERS_HOST, port),
                ("readers", PEERS_HOST, data_port),
            ):
                link = self._links[name, who] = Link(host, at, self._draw)
                stack.push_async_callback(link.close)
                await link.listen()
            flags = (
                "--model", model, *FLAGS, f"--connector={connector}",
                f"--data-port={data_port}", f"--advertise-host={PEERS_HOST}",
            )  # fmt: skip
            worker = await asyncio.to_thread(self._cluster.start_worker, role_of(name), *flags, name=name, port=port)
            worker.address = f"{WORKER_HOST}:{port}"  # what the test itself asks does not go over a link
            addresses[role_of(name)].append(f"{ROUTER_HOST}:{port}")
        await asyncio.to_thread(lambda: self._cluster.start_router("--model", model, *placement, **addresses))

    async def hurt(self, load: Load) -> None:
        """One fault, until all that it may have met is answered."""
        name = self._draw.choice(self.workers)
        links = self._draw.choice(("router", "peers", "readers", "all"))
        hurt = [link for (worker, who), link in self._links.items() if worker == name and links in (who, "all")]
        ways = [*WAYS, *(["corrupt"] if links == "readers" else []), *(["power"] if links == "all" else [])]
        way = self._draw.choice(ways)
        with load.sessions_may_be_lost(role_of(name) == "decode" and links in ("router", "all")):
            if way == "power":
                await self._cut_power(name, hurt)
            else:
                await self._hurt(hurt, way)
            await load.answered()

    async def _hurt(self, links: Sequence[Link], way: str) -> None:
        seconds = self._draw.choice(SECONDS)
        if self.workers == PAIR:
            seconds = min(seconds, LONGEST_OF_PAIR_S)
        for link in links:
            match way:
                case "reset":
                    link.reset()
                case "reset later":
                    link.reset_after(self._draw.randrange(1, 60_000))
                case "refuse":
                    link.refuse()
                case "silence":
                    link.be_silent()
                case "silent worker":
                    link.be_silent(True)
                case "deaf worker":
                    link.be_silent(False)
                case "slow":
                    link.slow_to(MEGABYTE)
                case "corrupt":
                    link.flip_after(self._draw.randrange(1_000, 100_000))
        if way != "reset":
            await asyncio.sleep(seconds)
        for link in links:
            await link.mend()

    async def _cut_power(self, name: str, links: Sequence[Link]) -> None:
        """The worker's machine is gone without a word, and comes back."""
        for link in links:
            link.be_silent()
        worker = self._cluster.services[name]
        worker.signal(signal.SIGKILL)
        await asyncio.to_thread(worker.process.wait, 30)
        await asyncio.to_thread(self._cluster.restart, name)
        self._cluster.services[name].address = worker.address
        for link in links:
            link.reset()
            await link.mend()


@pytest.mark.parametrize(
    ("connector", "workers", "placement", "seed"),
    [
        ("tcp", WORKERS, (), 1),
        ("tcp", WORKERS, ALL_REMOTE, 2),
        ("nixl", WORKERS, ALL_REMOTE, 3),
        ("tcp", PAIR, (), 4),
    ],
    ids=["tcp", "tcp-remote", "nixl-remote", "tcp-pair"],
)
async def test_i4_faults_of_the_network_change_no_answer(
    tiny_checkpoints: Callable[..., Path],
    tmp_path: Path,
    connector: str,
    workers: Sequence[str],
    placement: Sequence[str],
    seed: int,
) -> None:
    model = str(tiny_checkpoints("llama", num_hidden_layers=4))
    draw = random.Random(seed)
    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        async with AsyncExitStack() as stack:
            world = World(cluster, workers, draw)
            await world.start(stack, model, connector, placement)
            client = await stack.enter_async_context(InferenceClient(cluster.router.address))
            load = Load(client, seed, sessions=placement != ALL_REMOTE)
            await load.learn()
            load.begin()
            for _ in range(NUM_ROUNDS):
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                await world.hurt(load)
            await load.end()
        assert load.num_answers > 10 * NUM_ROUNDS
        check_whole(cluster)
