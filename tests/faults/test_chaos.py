"""Faults at random moments under load, alone or two at once: every answer stays what an undisturbed run gives.

The kill matrix holds a worker in a known phase; here nothing is held, so faults meet each other's aftermath: a worker
that comes back, a cache that others filled, a transfer that goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_processes import running_cluster
from tests.support.inference_client import InferenceClient
from tests.support.lora_adapters import adapter_flags

from .chaos_load import ALL_REMOTE, FLAGS, Load
from .worker_faults import WAYS, WORKERS, check_whole, hurt, role_of

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

NUM_ROUNDS = 15
PIECES = {"decode-2": ("--set", "stream_interval=3")}
"""An answer that goes on elsewhere may come in pieces of another size."""


HOST_TIER = ("--set", "num_blocks=60", "--set", "kv_host_mib=16")
"""Pools of a few sequences, and behind them room for all blocks."""


@pytest.mark.parametrize(
    ("connector", "at_once", "placement", "memory", "seed", "adapters"),
    [
        ("tcp", 1, (), (), 1, ()),
        ("nixl", 1, ALL_REMOTE, (), 2, ()),
        ("tcp", 2, ALL_REMOTE, (), 3, ()),
        ("nixl", 2, (), (), 4, ()),
        ("tcp", 1, ALL_REMOTE, HOST_TIER, 5, ()),
        ("tcp", 1, (), (), 5, ("one", "two", "three")),
        ("tcp", 2, ALL_REMOTE, (), 6, ("one", "two", "three")),
    ],
    ids=["tcp", "nixl-remote", "tcp-remote-two", "nixl-two", "tcp-remote-tier", "adapters", "adapters-remote-two"],
)
async def test_i4_faults_at_random_moments_change_no_answer(
    tiny_checkpoints: Callable[..., Path],
    tmp_path: Path,
    connector: str,
    at_once: int,
    placement: Sequence[str],
    memory: Sequence[str],
    seed: int,
    adapters: Sequence[str],
) -> None:
    base = tiny_checkpoints("llama", num_hidden_layers=4)
    model, draw = str(base), random.Random(seed)
    lora = adapter_flags(tmp_path / "adapters", base, *adapters) if adapters else ()
    with running_cluster(tmp_path) as cluster:
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        for name in WORKERS:
            flags = ["--model", model, *FLAGS, "--set", f"connector={connector}", *memory, *PIECES.get(name, ()), *lora]
            addresses[role_of(name)].append(cluster.start_worker(role_of(name), *flags, name=name).address)
        cluster.start_router("--model", model, *placement, **addresses)
        async with InferenceClient(cluster.router.address) as client:
            load = Load(client, seed, sessions=placement != ALL_REMOTE, models=("", *adapters))
            await load.learn()
            load.begin()
            for _ in range(NUM_ROUNDS):
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                victims = [draw.choice(WORKERS[:2]), draw.choice(WORKERS[2:])]  # never all of a role
                faults = [(cluster.services[name], draw.choice(WAYS)) for name in draw.sample(victims, at_once)]
                with load.sessions_may_be_lost(any(victim.role == "decode" for victim, _ in faults)):
                    await asyncio.gather(*(hurt(cluster, victim, way, draw) for victim, way in faults))
                    await load.answered()
            await load.end()
        assert load.num_answers > 10 * NUM_ROUNDS
        assert load.num_sessions or placement == ALL_REMOTE
        if memory:
            name = "pdserve_kv_host_blocks_loaded_total"
            assert sum(cluster.metric(cluster.services[worker], name) for worker in WORKERS) > 0
        check_whole(cluster)
