"""Every worker drains, ends and starts again, one after the other, under load: no request notices."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--dtype=float32", "--num-blocks=512", "--connector=tcp", "--max-model-len=1024")
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NUM_CLIENTS = 6
LENGTH = 120
LONGEST_GAP_S = 5.0
"""A worker that starts on the same two cores may stop a stream for a second."""


@dataclass
class Load:
    """Clients that ask one request after another, each for a prompt of its own, and what they got."""

    client: InferenceClient
    oracle: Oracle
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    longest_gap_s: float = 0.0
    is_over: bool = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._ask(random.Random(number)))

    async def _ask(self, draw: random.Random) -> None:
        while not self.is_over:
            prompt = prompt_of(draw.randint(20, 90), seed=draw.randrange(1 << 30))
            answer: list[int] = []
            at: float | None = None
            async for message in self.client.start(prompt, max_tokens=LENGTH, ignore_eos=True):
                now = time.monotonic()
                if at is not None:
                    self.longest_gap_s = max(self.longest_gap_s, now - at)
                at = now
                answer += message.token_ids
            self.answers.append((prompt, answer))

    def check(self) -> None:
        assert {len(answer) for _, answer in self.answers} == {LENGTH}
        for prompt, answer in random.Random(0).sample(self.answers, 20):
            self.oracle.check(prompt, answer)


class Computed:
    """Prompt tokens that the workers have computed, in all of their lives."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._of_lives: dict[tuple[str, int], float] = {}

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.1)

    async def look(self) -> None:
        for name in WORKERS:
            service = self._cluster.services[name]
            with suppress(OSError):  # it has ended, or not begun
                count = await asyncio.to_thread(
                    self._cluster.metric, service, "pdserve_prompt_tokens_by_source_total", 'source="computed"'
                )
                self._of_lives[name, service.process.pid] = count

    @property
    def num_tokens(self) -> float:
        return sum(self._of_lives.values())


@pytest.fixture
def cluster(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    model = tiny_checkpoints("llama")
    with running_cluster(tmp_path) as made:
        services = [
            made.launch_worker(name.partition("-")[0], "--model", str(model), *FLAGS, name=name) for name in WORKERS
        ]
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        for service in services:
            made.wait_for_worker(service)
            addresses[service.role].append(service.address)
        made.start_router("--model", str(model), "--policy=round_robin", "--local-prefill=never", **addresses)
        yield made, model
        made.check_pools()
        made.check_logs()


async def test_i16_a_rolling_restart_of_all_workers_fails_nothing(cluster: tuple[Cluster, Path]) -> None:
    made, model = cluster
    computed = Computed(made)
    async with InferenceClient(made.router.address) as client, httpx.AsyncClient(trust_env=False) as http:
        load = Load(client, Oracle(model))
        asking, watching = asyncio.create_task(load.run()), asyncio.create_task(computed.watch())
        for name in WORKERS:
            await _some_answers(load, asking)
            await _restart(made, http, name)
        await _some_answers(load, asking)
        load.is_over = True
        await asking
        watching.cancel()
        await computed.look()
    load.check()
    assert load.longest_gap_s < LONGEST_GAP_S
    assert made.metric(made.router, "pdserve_migrations_total", 'outcome="moved"') > 0
    assert made.metric(made.router, "pdserve_migrations_total", 'outcome="failed"') == 0
    assert made.metric(made.router, "pdserve_requests_total", 'outcome="length"') == len(load.answers)
    # each prompt once; what a worker computed after the last look at it is missing
    assert computed.num_tokens <= sum(len(prompt) for prompt, _ in load.answers)


async def _some_answers(load: Load, asking: asyncio.Task[None]) -> None:
    enough = len(load.answers) + 2 * NUM_CLIENTS
    await eventually(lambda: asking.done() or len(load.answers) >= enough, "more answers")
    assert not asking.done(), asking.exception()


async def _restart(cluster: Cluster, http: httpx.AsyncClient, name: str) -> None:
    url = f"http://{cluster.router.http}"
    leaving: Service = cluster.services[name]
    (await http.post(f"{url}/workers/{name}/drain", json={}, timeout=HANG_S)).raise_for_status()
    assert await asyncio.to_thread(leaving.process.wait, HANG_S) == 0, leaving.read_log()
    await asyncio.to_thread(cluster.restart, name)
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        workers = (await http.get(f"{url}/health", timeout=HANG_S)).json()["workers"]
        if all(workers[role]["live"] == 2 for role in ("prefill", "decode")):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} is not back")
