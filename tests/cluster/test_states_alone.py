"""A model with only states through router, prefill and decode: texts, and what the router sees of a prefix with few kept states."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from pdserve.router.placement.prefix_index import SPECULATIVE_S
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import make_state_model
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def test_a_prefix_is_found_by_its_last_state(tmp_path: Path) -> None:
    """The prompt's 6 full blocks leave the state after the last of them in prefill's cache, none after the first."""
    model = make_state_model(tmp_path / "mamba2", "mamba2")
    oracle = Oracle(model)
    flags = ("--dtype=float32", "--num-blocks=64")
    with pd_cluster(tmp_path, model, both=flags, router=("--local-prefill", "never")) as cluster:
        async with InferenceClient(cluster.router.address) as router, httpx.AsyncClient(trust_env=False) as http:
            for size in (1, 16, 17, 250):
                answer = await router.ask(prompt_of(size), max_tokens=24)
                oracle.check(prompt_of(size), answer.token_ids)
                assert "kv_landed" in answer.moments
            prompt = prompt_of(100, seed=1)
            await router.ask(prompt, max_tokens=4)
            # until then the router counts the blocks of the prompt that it has sent
            await asyncio.sleep(SPECULATIVE_S + 0.5)
            longer = [*prompt[:97], *prompt_of(30, seed=2)]
            answer = await router.ask(longer, max_tokens=4)
            oracle.check(longer, answer.token_ids)
            page = await http.get(f"http://{cluster.router.http}/debug/routing", timeout=HANG_S)
            [seen] = [each for each in page.json()["placements"][0]["candidates"] if each["role"] == "prefill"]
            assert seen["overlap_blocks"] == 6
        cluster.check_pools()
        cluster.check_logs()
