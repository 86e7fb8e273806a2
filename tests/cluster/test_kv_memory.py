"""Quantised KV caches and host-memory tiers through prefill and decode: the texts of transformers, and whole pools at the end."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import NEAR_TIE, Oracle
from tests.support.models.rounded_keys import rounded_keys
from tests.support.processes.cluster_processes import pd_cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.run.waiting import HANG_S, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]

STORED = {"int8": "int8", "fp8": "float8_e4m3fn"}
ROUNDED_NEAR_TIE = 0.03
"""Logits closer than this may change places with a rounded cache: as `TOLERANCE` of `tests/llm/test_kv_cache_dtype.py`."""
PROMPTS = [prompt_of(90 + 7 * seed, seed) for seed in range(5)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
async def test_i1_texts_are_those_of_transformers(
    kv_cache_dtype: str, tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    settings = ("dtype=float32", "num_blocks=20", "kv_host_mib=4", f"kv_cache_dtype={kv_cache_dtype}")
    flags = [f"--{setting}" for setting in settings]
    stored, oracle = STORED.get(kv_cache_dtype), Oracle(model)
    with pd_cluster(tmp_path, model, both=tuple(flags), router=("--local-prefill", "never")) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            # a pool of 320 tokens holds two of these prompts
            for _ in range(3):
                for prompt in PROMPTS:
                    answer = await router.ask(prompt, max_tokens=24)
                    with nullcontext() if stored is None else rounded_keys(stored):
                        oracle.check(prompt, answer.token_ids, NEAR_TIE if stored is None else ROUNDED_NEAR_TIE)
                    assert "kv_landed" in answer.moments
        for role in ("prefill", "decode"):
            service = cluster.services[role]
            # of 5 prompts with 5 full blocks each, asked for again twice; some may be in the pool
            assert cluster.metric(service, "pdserve_kv_host_blocks_loaded_total") >= 25
        cluster.check_pools()
        cluster.check_logs()


async def test_i4_a_text_goes_on_at_another_worker(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    flags = ("--model", str(model), "--dtype=float32", "--kv-cache-dtype=int8", "--kv-host-mib=4")
    pauses, oracle = PhasePauses(tmp_path / "pauses"), Oracle(model)
    with running_cluster(tmp_path, pauses.worker_program) as cluster:
        prefill = cluster.start_worker("prefill", *flags)
        decodes = [cluster.start_worker("decode", *flags, name=f"decode-{number}") for number in (1, 2)]
        addresses = [decode.address for decode in decodes]
        never = ("--local-prefill", "never")
        cluster.start_router("--model", str(model), *never, prefill=[prefill.address], decode=addresses)
        async with InferenceClient(cluster.router.address) as router:
            pauses.arm("streaming")
            asked = asyncio.create_task(router.ask(PROMPTS[0], max_tokens=40))
            victim = await pauses.reached(cluster)
            assert victim in decodes
            victim.signal(signal.SIGKILL)
            await asyncio.to_thread(victim.process.wait, HANG_S)
            pauses.go_on()
            answer = await asked
        with rounded_keys("int8"):
            oracle.check(PROMPTS[0], answer.token_ids, ROUNDED_NEAR_TIE)
        assert len(answer.token_ids) == 40
        cluster.check_pools()
        cluster.check_logs()


async def test_unequal_caches_are_not_paired(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    int8 = ("--kv-cache-dtype=int8",)
    with pd_cluster(tmp_path, model, both=("--dtype=float32",), prefill=int8) as cluster:
        await eventually(lambda: "dtype" in cluster.router.read_log(), "the router's log of the difference")
        assert re.search(r"dtype.*int8", cluster.router.read_log())
