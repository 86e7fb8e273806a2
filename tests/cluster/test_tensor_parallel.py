"""Clusters whose workers' ranks share a model: texts of `transformers`, and the death of a rank (`make test-all`)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service, pd_cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--dtype=float32", "--num-blocks=256", "--max-num-batched-tokens=64")
NEVER = ("--local-prefill", "never")
LENGTHS = (1, 16, 17, 250)
MAX_TOKENS = 16
DEATH_S = 5.0
"""Seconds within which a rank's death ends its worker."""


def ranks(size: int) -> tuple[str, ...]:
    return (f"--tensor-parallel-size={size}",)


def ranks_of(service: Service) -> list[int]:
    """The process ids of a worker's ranks above 0."""
    children = psutil.Process(service.process.pid).children()
    return [child.pid for child in children if "pdserve.worker.ranks.worker_rank" in child.cmdline()]


def computes(cluster: Cluster, service: Service) -> bool:
    return cluster.load(service).num_running > 0


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
async def test_i1_greedy_texts_through_ranks_of_both_workers(
    prefill: int, decode: int, tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with pd_cluster(tmp_path, model, both=FLAGS, prefill=ranks(prefill), decode=ranks(decode), router=NEVER) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            for length in LENGTHS:
                prompt = prompt_of(length)
                cold = await router.ask(prompt, max_tokens=MAX_TOKENS)
                oracle.check(prompt, cold.token_ids)
                assert "kv_landed" in cold.moments
                warm = await router.ask(prompt, max_tokens=MAX_TOKENS)
                assert warm.token_ids == cold.token_ids
        assert cluster.load(cluster.services["decode"]).prompt_tokens_computed == 0
        cluster.check_pools()
        cluster.check_logs()


async def test_i4_the_death_of_a_rank_ends_its_worker_and_no_request(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with running_cluster(tmp_path) as cluster:
        common = ("--model", str(model), *FLAGS)
        workers = [
            cluster.launch_worker(role, *common, *ranks(size), name=f"{role}-{size}")
            for role, size in (("prefill", 2), ("decode", 2), ("prefill", 1), ("decode", 1))
        ]
        for worker in workers:
            cluster.wait_for_worker(worker)
        addresses: dict[str, Any] = {
            role: [worker.address for worker in workers if worker.role == role] for role in ("prefill", "decode")
        }
        cluster.start_router("--model", str(model), "--policy=round_robin", *NEVER, **addresses)
        async with InferenceClient(cluster.router.address) as router:
            for name in ("decode-2", "prefill-2"):
                victim = cluster.services[name]
                [process] = ranks_of(victim)
                prompts = [prompt_of(200, seed) for seed in range(6)]
                asked = [asyncio.create_task(router.ask(prompt, max_tokens=60, cache_salt=name)) for prompt in prompts]
                await eventually(partial(computes, cluster, victim), "the victim computes")
                os.kill(process, signal.SIGKILL)
                since = time.monotonic()
                assert await asyncio.to_thread(victim.process.wait, HANG_S) == 1
                assert time.monotonic() - since < 2 * DEATH_S
                for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
                    oracle.check(prompt, answer.token_ids)
                assert "rank 1 ended by signal 9" in victim.read_log()
        cluster.check_pools()
