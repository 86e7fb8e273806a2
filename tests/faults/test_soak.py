"""Ten thousand requests, some of whose transfers fail: no process grows, in memory, sockets or threads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(1800)]

NUM_REQUESTS = 10_000
WARM_AFTER = 3_000
AT_ONCE = 32
FAILING = (str(Path(__file__).with_name("failing_worker.py")), "0.02")
MAY_GROW_BYTES = 24 << 20
"""Between warm and done, 7,000 requests: 3.5 KB a request would be seen."""
MAY_GROW = 4
"""Sockets and threads: pools of them breathe."""


@dataclass(frozen=True)
class Size:
    """Size of one process."""

    rss_bytes: int
    num_sockets: int
    num_threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Size:
        return cls(process.memory_info().rss, len(process.net_connections("tcp")), process.num_threads())


def _sizes(cluster: Cluster) -> dict[str, Size]:
    return {name: Size.of(psutil.Process(service.process.pid)) for name, service in cluster.services.items()}


async def test_no_process_grows(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = str(tiny_checkpoints("llama"))
    flags = ("--model", model, "--dtype=float32", "--num-blocks=400", "--connector=tcp")
    with running_cluster(tmp_path, FAILING) as cluster:
        prefill = cluster.start_worker("prefill", *flags)
        decode = cluster.start_worker("decode", *flags)
        cluster.start_router("--model", model, prefill=[prefill.address], decode=[decode.address])
        async with InferenceClient(cluster.router.address) as client:
            await _ask(client, 0, WARM_AFTER)
            warm = _sizes(cluster)
            await _ask(client, WARM_AFTER, NUM_REQUESTS)
        cluster.check_pools()
        done = _sizes(cluster)
        for name, size in done.items():
            before = warm[name]
            print(f"{name}: {before} -> {size}")
            assert size.rss_bytes < before.rss_bytes + MAY_GROW_BYTES, (name, before, size)
            assert size.num_sockets <= before.num_sockets + MAY_GROW, (name, before, size)
            assert size.num_threads <= before.num_threads + MAY_GROW, (name, before, size)
        cluster.check_logs()


async def _ask(client: InferenceClient, first: int, end: int) -> None:
    """Every request is answered in full."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        draw = random.Random(number)
        prompt = prompt_of(draw.choice((5, 20, 50, 90)), number)
        max_tokens = draw.choice((1, 2, 4))
        async with gate:
            answer = await client.ask(prompt, max_tokens=max_tokens)
            assert len(answer.token_ids) == max_tokens

    await asyncio.gather(*(one(number) for number in range(first, end)))
