"""Greedy output through prefill/decode over TCP is one engine's output is `transformers`' output, token for token (I1)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import pd_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.shared_cluster import FLAGS, THROUGH_BOTH, SharedCluster

pytestmark = pytest.mark.process

ARCHITECTURES = (
    "llama",
    pytest.param("mistral", marks=pytest.mark.slow),
    pytest.param("mistral sliding_window=45", marks=pytest.mark.slow),
    pytest.param("qwen2", marks=pytest.mark.slow),
    pytest.param("qwen3", marks=pytest.mark.slow),
    pytest.param("llama engine_process", marks=pytest.mark.slow),
)
"""The way through the services is the same for all; `tests/models` has every architecture in `make test`. The first one is that of
the shared cluster."""
LENGTHS = (1, 15, 16, 17, 31, 250, 1000)
MAX_TOKENS = 24


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(
    request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedCluster]:
    if request.param == ARCHITECTURES[0]:
        yield request.getfixturevalue("running_cluster")
        return
    architecture, *options = request.param.split()
    fields = {name: int(value) for name, _, value in (option.partition("=") for option in options) if value}
    model = tiny_checkpoints(architecture, **fields)
    flags = tuple(f"--{option}=true" for option in options if "=" not in option)
    folder = tmp_path_factory.mktemp("cluster")
    with pd_cluster(folder, model, both=(*FLAGS, *flags), router=THROUGH_BOTH) as processes:
        yield SharedCluster(processes, model, Oracle(model))


@pytest.fixture(autouse=True)
def at_rest(served: SharedCluster) -> Iterator[None]:
    yield
    served.processes.check_pools()
    served.processes.check_logs()


async def test_every_length_with_and_without_a_prefix_hit(served: SharedCluster) -> None:
    cluster, oracle = served.processes, served.oracle
    source, sink = cluster.services["prefill"], cluster.services["decode"]
    computed_by_decode = cluster.load(sink).prompt_tokens_computed
    async with InferenceClient(cluster.router.address) as router:
        for length in LENGTHS:
            prompt = prompt_of(length)
            cold = await router.ask(prompt, max_tokens=MAX_TOKENS)
            oracle.check(prompt, cold.token_ids)
            assert "kv_landed" in cold.moments, "it did not go through prefill/decode"

            computed = cluster.load(source).prompt_tokens_computed
            warm = await router.ask(prompt, max_tokens=MAX_TOKENS)  # both sides have its full blocks
            assert warm.token_ids == cold.token_ids
            cached = (length - 1) // 16 * 16
            assert cluster.load(source).prompt_tokens_computed - computed == length - cached

            await router.ask(prompt_of(length, seed=1), max_tokens=1)  # the prefill side alone
            source_hit = await router.ask(prompt_of(length, seed=1), max_tokens=MAX_TOKENS)
            oracle.check(prompt_of(length, seed=1), source_hit.token_ids)
    assert cluster.load(sink).prompt_tokens_computed == computed_by_decode, "decode computed prompt tokens"


async def test_a_prefix_hit_on_the_decode_side_alone(served: SharedCluster) -> None:
    async with (
        InferenceClient(served.router_of_decode.address) as local,
        InferenceClient(served.processes.router.address) as router,
    ):
        for length in (17, 31, 250):
            prompt = prompt_of(length, seed=2)
            one_engine = await local.ask(prompt, max_tokens=MAX_TOKENS)
            assert "kv_landed" not in one_engine.moments
            through_pd = await router.ask(prompt, max_tokens=MAX_TOKENS)
            assert "kv_landed" in through_pd.moments
            assert through_pd.token_ids == one_engine.token_ids
            served.oracle.check(prompt, through_pd.token_ids)


async def test_64_at_once(served: SharedCluster) -> None:
    prompts = [prompt_of(random.Random(seed).randrange(1, 120), seed=100 + seed) for seed in range(64)]
    async with InferenceClient(served.processes.router.address) as router:
        answers = await router.ask_all(prompts, max_tokens=12)
    for prompt, answer in zip(prompts, answers, strict=True):
        served.oracle.check(prompt, answer.token_ids)


async def test_seeded_sampling_is_equal_alone_and_in_one_batch(served: SharedCluster) -> None:
    """I5, through prefill/decode."""
    prompts = [prompt_of(20 + seed, seed=200 + seed) for seed in range(12)]
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 20}
    async with InferenceClient(served.processes.router.address) as router:
        alone = [await router.ask(prompt, seed=7, **sampling) for prompt in prompts]
        together = await router.ask_all(prompts, seed=7, **sampling)
        other = await router.ask(prompts[0], seed=8, **sampling)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert other.token_ids != alone[0].token_ids
