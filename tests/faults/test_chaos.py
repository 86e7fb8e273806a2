"""Faults at random moments under load, alone or two at once: every answer stays what an undisturbed run gives.

The kill matrix holds a worker in a known phase; here nothing is held, so faults meet each other's aftermath: a worker
that comes back, a cache that others filled, a transfer that goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_processes import Cluster, Service, running_cluster
from inference_client import InferenceClient
from random_prompts import prompt_of

from pdserve.v1 import request_pb2

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

NUM_ROUNDS = 15
NUM_CLIENTS = 10
WAYS = ("SIGKILL", "SIGTERM", "SIGSTOP")
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
FLAGS = (
    "--set", "dtype=float32", "--set", "num_blocks=300", "--set", "max_num_batched_tokens=64", "--set", "drain_s=10",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["sizes"],
}
SHARED = prompt_of(100, 7)
"""Begins several prompts: what one leaves in the caches is found by the others."""
REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (prompt_of(300, 1), {"max_tokens": 40}),
    "short": (prompt_of(20, 2), {"max_tokens": 12}),
    "seeded": ([*SHARED, *prompt_of(45, 3)], {"max_tokens": 60, "temperature": 0.9, "top_p": 0.95, "seed": 11}),
    "penalties": (
        [*SHARED, *prompt_of(33, 4)],
        {"max_tokens": 50, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 50},
    ),
    "form": (
        prompt_of(90, 5),
        {
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": 12,
            "structured_outputs": request_pb2.StructuredOutputs(json=json.dumps(SCHEMA)),
        },
    ),
    "logprobs": (prompt_of(150, 8), {"max_tokens": 20, "logprobs": 3, "stop_token_ids": [9, 17]}),
    "bias": (
        [*SHARED, *prompt_of(60, 9)],
        {"max_tokens": 25, "presence_penalty": 0.5, "temperature": 0.7, "seed": 3, "min_p": 0.02},
    ),
    "one": (prompt_of(80, 10), {"max_tokens": 1}),
    "two": ([*SHARED, *prompt_of(100, 11)], {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 5}),
    "three": (prompt_of(130, 6), {"max_tokens": 30, "temperature": 0.9, "seed": 13, "n": 3}),
}


class Load:
    """Clients that ask without end, and hold every answer to what is expected."""

    def __init__(self, client: InferenceClient, seed: int) -> None:
        self._client = client
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self._over = False
        self._clients: list[asyncio.Task[None]] = []
        self.expected: dict[str, list[list[int]]] = {}
        self.under_way: dict[int, asyncio.Event] = {}
        self.num_answers = 0
        self.num_left = 0

    async def begin(self) -> None:
        for name in REQUESTS:
            self.expected[name] = await self._ask(name, "calm")
        self._clients = [asyncio.create_task(self._keep_asking()) for _ in range(NUM_CLIENTS)]

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._clients)

    async def answered(self) -> None:
        """All that is under way now has ended: nothing meets the faults of two rounds."""
        for ended in list(self.under_way.values()):
            waiting = asyncio.create_task(ended.wait())
            done, _ = await asyncio.wait({waiting, *self._clients}, return_when=asyncio.FIRST_COMPLETED)
            if waiting not in done:
                waiting.cancel()
                await done.pop()  # a client that ends on its own has failed

    async def _ask(self, name: str, salt: str) -> list[list[int]]:
        prompt, params = REQUESTS[name]
        token_ids: list[list[int]] = [[] for _ in range(params.get("n", 1))]
        async for message in self._client.start(prompt, 60, salt, **params):
            token_ids[message.index] += message.token_ids
        return token_ids

    async def _keep_asking(self) -> None:
        while not self._over:
            number, name = next(self._numbers), self._draw.choice(list(REQUESTS))
            salt = self._draw.choice(("", "", f"{number}"))  # a salt of its own finds nothing cached
            patience_s = self._draw.choice((None, None, None, None, 0.02, 0.2))
            ended = self.under_way[number] = asyncio.Event()
            try:
                async with asyncio.timeout(patience_s):
                    assert await self._ask(name, salt) == self.expected[name], name
                self.num_answers += 1
            except TimeoutError:
                self.num_left += 1
            finally:
                ended.set()
                del self.under_way[number]


async def hurt(cluster: Cluster, victim: Service, way: str, draw: random.Random) -> None:
    """One fault, until the victim serves again."""
    if way == "SIGSTOP":
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(draw.choice((0.02, 0.3, 1.2, 3.0)))
        victim.signal(signal.SIGCONT)
        return
    victim.signal(signal.SIGKILL if way == "SIGKILL" else signal.SIGTERM)
    code = await asyncio.to_thread(victim.process.wait, 30)
    assert code == (-signal.SIGKILL if way == "SIGKILL" else 0), victim.read_log()
    await asyncio.to_thread(cluster.restart, victim.name)


@pytest.mark.parametrize(
    ("connector", "at_once", "seed"), [("tcp", 1, 1), ("nixl", 1, 2), ("tcp", 2, 3), ("nixl", 2, 4)]
)
async def test_i4_faults_at_random_moments_change_no_answer(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, connector: str, at_once: int, seed: int
) -> None:
    model = str(tiny_checkpoints("llama", num_hidden_layers=4))
    draw = random.Random(seed)
    with running_cluster(tmp_path) as cluster:
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        for name in WORKERS:
            role = name.partition("-")[0]
            flags = ("--model", model, *FLAGS, "--set", f"connector={connector}")
            addresses[role].append(cluster.start_worker(role, *flags, name=name).address)
        cluster.start_router("--model", model, **addresses)
        async with InferenceClient(cluster.router.address) as client:
            load = Load(client, seed)
            await load.begin()
            for _ in range(NUM_ROUNDS):
                await asyncio.sleep(draw.uniform(0.0, 0.6))
                victims = [draw.choice(WORKERS[:2]), draw.choice(WORKERS[2:])]  # never all of a role
                faults = [(cluster.services[name], draw.choice(WAYS)) for name in draw.sample(victims, at_once)]
                await asyncio.gather(*(hurt(cluster, victim, way, draw) for victim, way in faults))
                await load.answered()
            await load.end()
        assert load.num_answers > 10 * NUM_ROUNDS
        cluster.check_pools()
        for name in WORKERS:
            assert cluster.load(cluster.services[name]).blocks_quarantined == 0
        cluster.check_logs()
