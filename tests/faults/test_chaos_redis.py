"""Redis is killed, stopped and emptied at random moments under load, and workers meanwhile: no answer changes, no request
fails.

Two routers share the workers, which they know through Redis alone.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.processes.cluster_processes import running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.redis_server import RedisServer, redis_server

from .chaos_load import FLAGS, Load
from .prepared_worker import PREPARED_WORKER
from .worker_faults import WAYS, WORKERS, check_whole, hurt, role_of

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

NUM_ROUNDS = 10
AWAY_S = (0.05, 0.5, 2.5, 4.5)
"""Shorter and longer than a record lives, and than it takes to notice."""


async def hurt_redis(redis: RedisServer, draw: random.Random) -> None:
    """One fault, to its end."""
    away_s = draw.choice(AWAY_S)
    match draw.choice(("kill", "stop", "flush")):
        case "kill":
            redis.kill()
            await asyncio.sleep(away_s)
            await asyncio.to_thread(redis.start)
        case "stop":
            redis.signal(signal.SIGSTOP)
            await asyncio.sleep(away_s)
            redis.signal(signal.SIGCONT)
        case "flush":
            await asyncio.to_thread(redis.do, "FLUSHALL")


@pytest.mark.parametrize(("at_once", "seed"), [(0, 1), (2, 2)])
async def test_i4_redis_at_random_moments_changes_no_answer(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, at_once: int, seed: int
) -> None:
    """at_once: workers that are hurt together with Redis."""
    model = str(tiny_checkpoints("llama", num_hidden_layers=4))
    draw = random.Random(seed)
    with redis_server(tmp_path) as redis, running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        common = ("--model", model, "--redis", redis.url, "--redis-namespace=test")
        for name in WORKERS:
            cluster.start_worker(role_of(name), *common, *FLAGS, "--connector=tcp", name=name)
        routers = [cluster.start_router(*common, name=name) for name in ("router", "router-2")]
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(InferenceClient(router.address)) for router in routers]
            loads = [Load(client, seed + number, num_clients=5) for number, client in enumerate(clients)]
            for load in loads:
                await load.learn()
            assert loads[0].expected == loads[1].expected
            for load in loads:
                load.begin()
            for _ in range(NUM_ROUNDS):
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                victims = [draw.choice(WORKERS[:2]), draw.choice(WORKERS[2:])]
                faults = [(cluster.services[name], draw.choice(WAYS)) for name in draw.sample(victims, at_once)]
                with loads[0].sessions_may_be_lost(at_once > 0), loads[1].sessions_may_be_lost(at_once > 0):
                    hurts = [hurt(cluster, victim, way, draw) for victim, way in faults]
                    await asyncio.gather(hurt_redis(redis, draw), *hurts)
                    for load in loads:
                        await load.answered()
            for load in loads:
                await load.end()
        assert all(load.num_answers > 5 * NUM_ROUNDS and load.num_sessions for load in loads)
        check_whole(cluster)
