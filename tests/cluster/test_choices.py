"""Several sequences of one prompt through real prefill and decode processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_processes import pd_cluster
from tests.support.inference_client import InferenceClient
from tests.support.oracle import Oracle
from tests.support.random_prompts import prompt_of

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=256", "--max-num-batched-tokens=64")
MAX_TOKENS = 20


@pytest.mark.slow
async def test_i1_i5_sequences_through_p_and_d(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with pd_cluster(tmp_path, model, both=FLAGS, router=("--local-prefill", "never")) as cluster:
        source, sink = cluster.services["prefill"], cluster.services["decode"]
        alone = cluster.start_router("--model", str(model), decode=[sink.address], name="router-alone")
        async with InferenceClient(cluster.router.address) as router, InferenceClient(alone.address) as one_engine:
            through_pd = {}
            for length in (16, 17):
                prompt = prompt_of(length)
                for token_ids in await router.ask_choices(prompt, 3, max_tokens=MAX_TOKENS):
                    assert len(token_ids) == MAX_TOKENS
                    oracle.check(prompt, token_ids)
                sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": MAX_TOKENS}
                through_pd[length] = await router.ask_choices(prompt, 4, **sampling)
                assert len({*map(tuple, through_pd[length])}) == 4
                assert (await router.ask(prompt, **sampling)).token_ids == through_pd[length][0]
            assert cluster.load(source).prompt_tokens_computed > 0
            assert cluster.load(sink).prompt_tokens_computed == 0, "decode computed a prompt"
            for length, expected in through_pd.items():
                assert await one_engine.ask_choices(prompt_of(length), 4, **sampling) == expected
            # what stops one sequence does not stop the others
            stopped = await router.ask_choices(prompt_of(17), 4, **sampling, stop_token_ids=[through_pd[17][2][9]])
            assert stopped[2] == through_pd[17][2][: len(stopped[2])]
            assert len(stopped[2]) <= 10
            assert max(map(len, stopped)) > 10
        cluster.check_pools()
        cluster.check_logs()
