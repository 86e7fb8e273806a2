"""Workers whose ranks share a model: texts of `transformers` through prefill and decode of equal and unequal degrees (I1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster_processes import pd_cluster
from tests.support.inference_client import InferenceClient
from tests.support.oracle import Oracle
from tests.support.random_prompts import prompt_of

pytestmark = pytest.mark.process

FLAGS = ("--set", "dtype=float32", "--set", "num_blocks=256", "--set", "max_num_batched_tokens=64")
NEVER = ("--local-prefill", "never")
LENGTHS = (1, 16, 17, 250)
MAX_TOKENS = 16


def ranks(size: int) -> tuple[str, str]:
    return ("--set", f"tensor_parallel_size={size}")


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
async def test_i1_greedy_texts_through_ranks_of_both_workers(
    prefill: int, decode: int, tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with pd_cluster(tmp_path, model, both=FLAGS, prefill=ranks(prefill), decode=ranks(decode), router=NEVER) as cluster:
        async with InferenceClient(cluster.router.address) as router:
            for length in LENGTHS:
                prompt = prompt_of(length)
                cold = await router.ask(prompt, max_tokens=MAX_TOKENS)
                oracle.check(prompt, cold.token_ids)
                assert "kv_landed" in cold.moments
                warm = await router.ask(prompt, max_tokens=MAX_TOKENS)
                assert warm.token_ids == cold.token_ids
        assert cluster.load(cluster.services["decode"]).prompt_tokens_computed == 0
        cluster.check_pools()
        cluster.check_logs()
