"""A worker that leaves between two turns of conversations: others have read what it had cached (I15)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

BLOCK = 16
FLAGS = ("--dtype=float32", "--num-blocks=256", "--connector=tcp")
NUM_CONVERSATIONS = 3


async def test_i15_no_turn_computes_again_what_a_worker_had_that_left(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    with running_cluster(tmp_path) as cluster:
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        workers = [
            cluster.launch_worker(role, "--model", str(model), *FLAGS, name=f"{role}-{number}")
            for role in addresses
            for number in range(2)
        ]
        for worker in workers:
            cluster.wait_for_worker(worker)
            addresses[worker.role].append(worker.address)
        cluster.start_router(
            "--model", str(model), "--local-prefill=never", "--block-moves=always", **addresses
        )  # fmt: skip
        await _converse(cluster, Oracle(model))
        cluster.check_pools()
        cluster.check_logs()


async def _converse(cluster: Cluster, oracle: Oracle) -> None:
    texts = [prompt_of(70 + number, seed=number) for number in range(NUM_CONVERSATIONS)]
    known = [0] * NUM_CONVERSATIONS
    async with InferenceClient(cluster.router.address) as router:
        for turn, leaving in enumerate((None, "decode", "decode", "prefill", "decode")):
            if leaving is not None:
                await _restart(cluster, leaving, await _placed(cluster, leaving))
            for number, text in enumerate(texts):
                answer = await router.ask(text, max_tokens=40)
                oracle.check(text, answer.token_ids)
                assert answer.cached_tokens == known[number], f"turn {turn} of conversation {number}"
                texts[number] = [*text, *answer.token_ids, *prompt_of(9, seed=100 * number + turn)]
                known[number] = (len(texts[number]) - 9 - 1) // BLOCK * BLOCK
            await eventually(lambda: cluster.metric(cluster.router, "pdserve_indexed_blocks") >= sum(known) // BLOCK)
            await asyncio.sleep(0.1)  # of each worker, too
    assert "others have read" in cluster.router.read_log()


async def _placed(cluster: Cluster, role: str) -> str:
    """The worker of this role that served the last turn."""
    async with httpx.AsyncClient(trust_env=False) as http:
        page = (await http.get(f"http://{cluster.router.http}/debug/routing", timeout=HANG_S)).json()
    name: str = page["placements"][0][role]
    return name


async def _restart(cluster: Cluster, role: str, name: str) -> None:
    url, leaving = f"http://{cluster.router.http}", cluster.services[name]
    async with httpx.AsyncClient(trust_env=False) as http:
        (await http.post(f"{url}/workers/{name}/drain", json={}, timeout=HANG_S)).raise_for_status()
        assert await asyncio.to_thread(leaving.process.wait, HANG_S) == 0, leaving.read_log()
        await asyncio.to_thread(cluster.restart, name)
        async with asyncio.timeout(HANG_S):
            while True:
                workers = (await http.get(f"{url}/health", timeout=HANG_S)).json()["workers"]
                if workers[role]["live"] == 2:
                    return
                await asyncio.sleep(0.05)
