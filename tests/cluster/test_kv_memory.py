"""Quantised KV caches and host-memory tiers through prefill and decode: the texts of transformers, and whole pools at the end."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.cluster_processes import Cluster, Service, pd_cluster
from tests.support.inference_client import InferenceClient
from tests.support.oracle import NEAR_TIE, Oracle
from tests.support.random_prompts import prompt_of
from tests.support.rounded_keys import rounded_keys
from tests.support.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]

STORED = {"int8": "int8", "fp8": "float8_e4m3fn"}
ROUNDED_NEAR_TIE = 0.03
"""Logits closer than this may change places with a rounded cache: as `TOLERANCE` of `tests/llm/test_kv_cache_dtype.py`."""
PROMPTS = [prompt_of(90 + 7 * seed, seed) for seed in range(5)]


def metric(cluster: Cluster, service: Service, name: str) -> float:
    with urllib.request.urlopen(f"{cluster.metrics_url(service)}/metrics") as response:
        found = re.search(rf"^{name} (\S+)$", response.read().decode(), re.MULTILINE)
    assert found is not None, f"no {name}"
    return float(found[1])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
async def test_i1_texts_are_those_of_transformers(
    kv_cache_dtype: str, tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    settings = ("dtype=float32", "num_blocks=20", "kv_host_mib=4", f"kv_cache_dtype={kv_cache_dtype}")
    flags = [word for setting in settings for word in ("--set", setting)]
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
            assert metric(cluster, service, "pdserve_kv_host_blocks_loaded_total") >= 25
        cluster.check_pools()
        cluster.check_logs()


async def test_unequal_caches_are_not_paired(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    int8 = ("--set", "kv_cache_dtype=int8")
    with pd_cluster(tmp_path, model, both=("--set", "dtype=float32"), prefill=int8) as cluster:
        await eventually(lambda: "dtype" in cluster.router.read_log(), "the router's log of the difference")
        assert re.search(r"dtype.*int8", cluster.router.read_log())
