"""A model that the code of `transformers` computes, through prefill and decode processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.any_family import make_any_family
from tests.support.models.checkpoints import save_tokenizer
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster
from tests.support.processes.inference_client import InferenceClient

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("engine_process", ["false", "true"])
async def test_i1_texts_are_those_of_transformers(engine_process: str, tmp_path: Path) -> None:
    model = tmp_path / "stablelm"
    make_any_family(model, "stablelm")
    save_tokenizer(model)
    oracle = Oracle(model)
    flags = ("--model-impl", "auto", "--num-blocks=64", f"--engine-process={engine_process}")
    with pd_cluster(tmp_path, model, both=flags, router=("--local-prefill", "never")) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            for size in (1, 16, 17, 90):
                prompt = prompt_of(size)
                answer = await router.ask(prompt, max_tokens=24)
                oracle.check(prompt, answer.token_ids)
                assert "kv_landed" in answer.moments
        cluster.check_pools()
        cluster.check_logs()
