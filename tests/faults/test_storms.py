"""Many clients at once: they leave in any phase, workers are replaced under them, their router dies."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

from .prepared_worker import PREPARED_WORKER

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

FLAGS = ("--dtype=float32", "--num-blocks=300", "--max-num-batched-tokens=64")
GONE_S = 3.0
"""A killed router's work has stopped within so long."""


@pytest.mark.faults
@pytest.mark.parametrize("connector", ["tcp", "nixl"])
async def test_i7_a_storm_of_aborts_leaves_nothing_behind(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, connector: str
) -> None:
    """1,000 requests, 64 at once, most clients leave."""
    draw = random.Random(17)
    gate = asyncio.Semaphore(64)
    num_left = num_answered = 0

    async def one(client: InferenceClient, number: int) -> None:
        nonlocal num_left, num_answered
        prompt = prompt_of(draw.choice((1, 16, 40, 120, 500)), number % 60)
        max_tokens = draw.choice((1, 2, 10, 40))
        patience_s = draw.choice((None, 0.0, 0.002, 0.01, 0.05, 0.2, 0.5))
        async with gate:
            tokens, has_ended = await client.ask_within(
                patience_s, prompt, max_tokens=max_tokens, temperature=1.0, seed=number
            )
            if has_ended:
                assert len(tokens) == max_tokens
                num_answered += 1
            else:
                num_left += 1

    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        _start(cluster, tiny_checkpoints("llama", num_hidden_layers=4), (f"--connector={connector}",))
        async with InferenceClient(cluster.router.address) as client:
            await asyncio.gather(*(one(client, number) for number in range(1000)))
            assert num_left > 200
            assert num_answered > 100
            cluster.check_pools()
            for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
                assert cluster.load(cluster.services[name]).blocks_quarantined == 0
            assert len((await client.ask(prompt_of(40, 1), max_tokens=5)).token_ids) == 5
        cluster.check_logs()


@pytest.mark.faults
async def test_replacing_every_worker_under_load_loses_nothing(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    prompts = [prompt_of(30 + 11 * number, number) for number in range(12)]
    sampling: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 5}
    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        _start(cluster, tiny_checkpoints("llama", num_hidden_layers=4), ())
        async with InferenceClient(cluster.router.address) as client:
            expected = [answer.token_ids for answer in await client.ask_all(prompts, **sampling)]
            over = False
            num_answers = 0

            async def keep_asking(number: int) -> None:
                nonlocal num_answers
                turn = 0
                while not over:
                    answer = await client.ask(prompts[number], cache_salt=f"{number}-{turn}", **sampling)
                    assert answer.token_ids == expected[number]
                    turn += 1
                    num_answers += 1

            load = [asyncio.create_task(keep_asking(number)) for number in range(len(prompts))]
            for name in ("prefill-1", "decode-1", "prefill-2", "decode-2"):
                service = cluster.services[name]
                before = num_answers
                service.signal(signal.SIGTERM)
                assert await asyncio.to_thread(service.process.wait, HANG_S) == 0
                await asyncio.to_thread(cluster.restart, name)
                while num_answers < before + 2 * len(prompts):  # it serves on, with the new one
                    done = [task for task in load if task.done()]
                    assert not done, done[0].exception()
                    await asyncio.sleep(0.02)
            over = True
            await asyncio.gather(*load)
        cluster.check_pools()
        cluster.check_logs()


async def test_a_killed_router_leaves_both_workers_whole(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    with running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        model = str(tiny_checkpoints("llama", num_hidden_layers=4))
        prefill = cluster.start_worker("prefill", "--model", model, *FLAGS)
        decode = cluster.start_worker("decode", "--model", model, *FLAGS)
        cluster.start_router("--model", model, prefill=[prefill.address], decode=[decode.address])
        async with InferenceClient(cluster.router.address) as client:
            calls = [client.start(prompt_of(300, number), max_tokens=3000) for number in range(6)]
            await asyncio.gather(*(anext(aiter(call)) for call in calls))
            cluster.router.signal(signal.SIGKILL)
            cluster.router.process.wait(HANG_S)
            since = time.monotonic()
            for service in (prefill, decode):
                load = cluster.load(service)
                while load.blocks_in_use or load.open_transfers or load.num_running or load.num_waiting:
                    assert time.monotonic() - since < 2 * GONE_S, f"{service.name} still works: {load}"
                    await asyncio.sleep(0.05)
                    load = cluster.load(service)
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
        cluster.check_pools()
        cluster.check_logs()


def _start(cluster: Cluster, model: Path, flags: tuple[str, ...]) -> None:
    """Two workers of each role and a router."""
    addresses: dict[str, Any] = {"prefill": [], "decode": []}
    for role in ("prefill", "decode"):
        for number in (1, 2):
            worker = cluster.start_worker(role, "--model", str(model), *FLAGS, *flags, name=f"{role}-{number}")
            addresses[role].append(worker.address)
    cluster.start_router("--model", str(model), "--policy=round_robin", **addresses)
