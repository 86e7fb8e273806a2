"""Workers with a disk below host memory: what they computed is there after their death, and under other workers' prompts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROMPTS = [prompt_of(90 + 7 * seed, seed) for seed in range(8)]
COMMON = ("--dtype=float32", "--num-blocks=20", "--kv-host-mib=1", "--kv-disk-gib=0.1")
SETTINGS = {
    "tcp": ("--connector=tcp",),
    "nixl": ("--connector=nixl",),
    "engine process": ("--connector=tcp", "--engine-process=true"),
    "ranks": ("--connector=tcp", "--tensor-parallel-size=2"),
    "int8": ("--connector=tcp", "--kv-cache-dtype=int8"),
}


def read(cluster: Cluster, worker: Service, name: str = "read") -> float:
    return cluster.metric(worker, f"pdserve_kv_store_blocks_{name}_total")


async def ask_all(router: InferenceClient) -> list[list[int]]:
    return [(await router.ask(prompt, max_tokens=12)).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("kind", SETTINGS)
async def test_i1_prompts_come_back_after_a_death(
    kind: str, tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    model = tiny_checkpoints("llama")
    flags = ("--model", str(model), *COMMON, *SETTINGS[kind], f"--kv-disk-path={tmp_path / 'disk'}")
    with running_cluster(tmp_path) as cluster:
        for role in ("prefill", "decode"):
            cluster.launch_worker(role, *flags)
        prefill, decode = (cluster.services[role] for role in ("prefill", "decode"))
        for worker in (prefill, decode):
            cluster.wait_for_worker(worker)
        never = ("--model", str(model), "--local-prefill", "never")
        cluster.start_router(*never, prefill=[prefill.address], decode=[decode.address])
        async with InferenceClient(cluster.router.address) as router:
            first = await ask_all(router)
            if kind != "int8":
                oracle = Oracle(model)
                for prompt, tokens in zip(PROMPTS, first, strict=True):
                    oracle.check(prompt, tokens)
            # the pool has the last two prompts; all others have been in host memory, and are on their way to the disk
            await eventually(lambda: read(cluster, prefill, "written") >= 5 * 5)
            cluster.check_pools()
            prefill.signal(signal.SIGKILL)
            await asyncio.to_thread(prefill.process.wait, HANG_S)
            prefill = cluster.restart("prefill")
            await eventually(lambda: cluster.metric(prefill, "pdserve_kv_store_blocks") >= 5 * 5)
            assert await ask_tokens_when_back(router, PROMPTS[0]) == first[0]
            assert await ask_all(router) == first
        assert read(cluster, prefill) >= 5
        assert read(cluster, prefill, "failed") == 0
        cluster.check_pools()
        cluster.check_logs()


async def ask_tokens_when_back(router: InferenceClient, prompt: list[int]) -> list[int]:
    """Until the router has seen the worker's return, it answers that none is there."""

    async def ask() -> list[int] | None:
        try:
            return (await router.ask(prompt, max_tokens=12)).token_ids
        except grpc.aio.AioRpcError:
            return None

    give_up_at = asyncio.get_running_loop().time() + HANG_S
    while (tokens := await ask()) is None:
        assert asyncio.get_running_loop().time() < give_up_at
        await asyncio.sleep(0.1)
    return tokens
