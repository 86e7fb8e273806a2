"""Workers that share a Mooncake Store: what one has computed another one finds, whichever process dies, with the same texts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.test_kv_disk import PROMPTS, ask_all, ask_tokens_when_back, read
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.mooncake_master import mooncake_master
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]

COMMON = ("--dtype=float32", "--num-blocks=20", "--kv-host-mib=1", "--connector=tcp")
MORE = [prompt_of(100, 100 + seed) for seed in range(60)]
"""More blocks than the pool and host memory have, of ranks too."""
SETTINGS = {"one process": (), "engine process": ("--engine-process=true",), "ranks": ("--tensor-parallel-size=2",)}


@pytest.mark.parametrize("kind", SETTINGS)
async def test_i1_workers_share_blocks_whoever_dies(
    kind: str, tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with mooncake_master(tmp_path) as master, running_cluster(tmp_path) as cluster:
        flags = ("--model", str(model), *COMMON, *SETTINGS[kind], "--kv-store", master.url(segment_mib=32))
        for role in ("prefill", "decode"):
            cluster.launch_worker(role, *flags)
        prefill, decode = (cluster.services[role] for role in ("prefill", "decode"))
        for worker in (prefill, decode):
            cluster.wait_for_worker(worker)
        never = ("--model", str(model), "--local-prefill", "never")
        cluster.start_router(*never, prefill=[prefill.address], decode=[decode.address])
        async with InferenceClient(cluster.router.address) as router:
            first = await ask_all(router)
            for prompt, tokens in zip(PROMPTS, first, strict=True):
                oracle.check(prompt, tokens)
            await eventually(lambda: read(cluster, prefill, "written") >= 5 * 5)
            cluster.check_pools()
            # half of what it wrote lies in its own memory
            prefill.signal(signal.SIGKILL)
            await asyncio.to_thread(prefill.process.wait, HANG_S)
            prefill = cluster.restart("prefill")
            assert await ask_tokens_when_back(router, PROMPTS[0]) == first[0]
            assert await ask_all(router) == first
            assert read(cluster, prefill, "found") > 0
            cluster.check_pools()
            master.kill()
            assert await ask_all(router) == first
            # the master has lost all, and what is computed from now on goes around through it
            master.start()
            more = [(await router.ask(prompt, max_tokens=4)).token_ids for prompt in MORE]
            oracle.check(MORE[0], more[0])
            come_back = read(cluster, prefill)
            give_up_at = asyncio.get_running_loop().time() + HANG_S
            while read(cluster, prefill) == come_back:
                assert asyncio.get_running_loop().time() < give_up_at, "nothing is read after the master's return"
                assert [(await router.ask(prompt, max_tokens=4)).token_ids for prompt in MORE] == more
        cluster.check_pools()
        cluster.check_logs()
