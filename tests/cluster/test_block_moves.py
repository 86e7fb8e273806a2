"""Cached blocks that move to where a prompt is computed, through a router: conversations on two workers of each role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, pd_cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

pytestmark = pytest.mark.process

BLOCK = 16
FLAGS = ("--dtype=float32", "--num-blocks=256", "--connector=tcp")


@pytest.fixture(scope="module")
def served(
    tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Oracle]]:
    """Workers in turn, so that no worker has what the last turn left at another."""
    model = tiny_checkpoints("llama")
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        workers = {
            role: [
                cluster.launch_worker(role, "--model", str(model), *FLAGS, name=f"{role}-{number}")
                for number in range(2)
            ]
            for role in ("prefill", "decode")
        }
        for of_role in workers.values():
            for worker in of_role:
                cluster.wait_for_worker(worker)
        cluster.start_router(
            "--model", str(model), "--policy=round_robin", "--local-prefill=never", "--block-moves=always",
            prefill=[worker.address for worker in workers["prefill"]],
            decode=[worker.address for worker in workers["decode"]],
        )  # fmt: skip
        yield cluster, Oracle(model)
        cluster.check_pools()
        cluster.check_logs()


def placements(cluster: Cluster) -> list[dict[str, Any]]:
    """The last ones, newest first."""
    page = httpx.get(f"http://{cluster.router.http}/debug/routing", timeout=HANG_S, trust_env=False).json()
    found: list[dict[str, Any]] = page["placements"]
    return found


async def reported(cluster: Cluster, num_blocks: int) -> None:
    """Wait until the router knows of so many different blocks."""
    await eventually(lambda: cluster.metric(cluster.router, "pdserve_indexed_blocks") >= num_blocks)


async def test_i1_a_turn_computes_only_what_no_worker_has(served: tuple[Cluster, Oracle]) -> None:
    cluster, oracle = served
    text = prompt_of(70, seed=1)
    async with InferenceClient(cluster.router.address) as router:
        known = 0
        for turn in range(6):
            answer = await router.ask(text, max_tokens=20)
            oracle.check(text, answer.token_ids)
            assert answer.cached_tokens == known, f"turn {turn}"
            if turn:
                move = placements(cluster)[0]["move"]
                assert move["source"].startswith("decode"), "the answer was made there"
                assert "blocks_landed" in answer.moments
            text = [*text, *answer.token_ids, *prompt_of(9, seed=turn + 2)]
            known = (len(text) - 9 - 1) // BLOCK * BLOCK  # the last token of an answer is never computed
            await reported(cluster, known // BLOCK)
            await asyncio.sleep(0.1)  # of the decode worker, too


async def test_i4_a_source_that_dies_costs_a_computation(served: tuple[Cluster, Oracle]) -> None:
    cluster, oracle = served
    prompts = [prompt_of(200, seed=50 + number) for number in range(4)]
    async with InferenceClient(cluster.router.address) as router:
        for prompt in prompts:
            await router.ask(prompt, max_tokens=4)
        await asyncio.sleep(0.3)  # workers report every 20 ms
        for name in ("decode-0", "decode-1"):
            asked = [asyncio.create_task(router.ask([*prompt, 7, 8], max_tokens=12)) for prompt in prompts]
            await asyncio.sleep(0.02)
            cluster.services[name].process.kill()
            for prompt, task in zip(prompts, asked, strict=True):
                oracle.check([*prompt, 7, 8], (await task).token_ids)
            cluster.services[name].process.wait(HANG_S)
            cluster.restart(name)
            await asyncio.sleep(1)  # the router finds it again


SETTINGS = {
    "tcp": ("--connector=tcp",),
    "nixl": ("--connector=nixl",),
    "engine process": ("--connector=tcp", "--engine-process=true"),
    "ranks": ("--connector=tcp", "--tensor-parallel-size=2"),
    "int8": ("--connector=tcp", "--kv-cache-dtype=int8"),
}


@pytest.mark.parametrize(
    "settings", [pytest.param(name, marks=() if name == "engine process" else pytest.mark.slow) for name in SETTINGS]
)
async def test_i1_prefill_reads_the_last_answer_from_decode(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, settings: str
) -> None:
    if settings == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    flags = ("--dtype=float32", "--num-blocks=256", *SETTINGS[settings])
    router_flags = ("--local-prefill=never", "--block-moves=always")
    text = prompt_of(70, seed=1)
    with pd_cluster(tmp_path, model, both=flags, router=router_flags) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            for turn in range(3):
                answer = await router.ask(text, max_tokens=20)
                if settings != "int8":
                    oracle.check(text, answer.token_ids)
                if turn:
                    assert placements(cluster)[0]["move"]["source"] == "decode"
                    assert "blocks_landed" in answer.moments
                    assert answer.cached_tokens >= len(text) - 40
                text = [*text, *answer.token_ids, *prompt_of(9, seed=turn + 2)]
                await asyncio.sleep(0.3)  # workers report every 20 ms
        prefill = cluster.services["prefill"]
        assert cluster.metric(prefill, "pdserve_prompt_tokens_by_source_total", 'source="peer"') > 0
        assert (
            cluster.metric(
                prefill, "pdserve_kv_transfer_bytes_total", f'connector="{"nixl" if settings == "nixl" else "tcp"}"'
            )
            > 0
        )
        cluster.check_pools()
        cluster.check_logs()
