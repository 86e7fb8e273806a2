"""Small pools, preemption, clients that leave: every request its own answer, every pool whole (I2, I7)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.processes.inference_client import Answer, InferenceClient
from tests.support.run.waiting import eventually

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype=float32", "--num-blocks=24", "--max-num-batched-tokens=64")
    with pd_cluster(tmp_path_factory.mktemp("small"), model, both=flags) as cluster:
        yield cluster
        cluster.check_pools()
        cluster.check_logs()


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.slow)])
async def test_preemption_changes_no_answer(small: Cluster, model: Path, count: int) -> None:
    oracle = Oracle(model)
    # each grows from 3 or 4 blocks to 16, beyond the 128 tokens for which decode keeps room; 24 blocks hold one of them to its end
    prompts = [prompt_of(50 + seed, seed) for seed in range(count)]
    async with InferenceClient(small.router.address) as router:
        answers = await router.ask_all(prompts, max_tokens=200)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(prompt, answer.token_ids)
    assert small.load(small.services["decode"]).num_preemptions > 0, "the pool was not small enough to show anything"


@pytest.mark.slow
async def test_seeded_sampling_survives_preemption(small: Cluster) -> None:
    """I5."""
    prompts = [prompt_of(50 + seed, 50 + seed) for seed in range(6)]
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 200}
    async with InferenceClient(small.router.address) as router:
        before = small.load(small.services["decode"]).num_preemptions
        together = await router.ask_all(prompts, **sampling)
        assert small.load(small.services["decode"]).num_preemptions > before
        alone = [await router.ask(prompt, **sampling) for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


async def test_reservations_do_not_wait_for_each_other(model: Path, tmp_path: Path) -> None:
    """Pools of 100 blocks, some 30 in use on decode, requests of 90 and 15: both complete, nothing is prefilled twice."""
    oracle = Oracle(model)
    flags = ("--dtype=float32", "--num-blocks=100", "--max-num-batched-tokens=256")
    with pd_cluster(tmp_path, model, both=flags, router=("--local-prefill", "never")) as cluster:
        source, sink = cluster.services["prefill"], cluster.services["decode"]
        long_running, ninety, fifteen = prompt_of(29 * 16 + 1, 1), prompt_of(89 * 16 + 5, 2), prompt_of(14 * 16 + 5, 3)
        async with InferenceClient(cluster.router.address) as router:
            stream = router.start(long_running, max_tokens=1000)
            first: Answer = Answer(token_ids=list((await anext(aiter(stream))).token_ids))
            # its first token comes from prefill
            await eventually(lambda: cluster.load(sink).blocks_in_use >= 29, "the long one runs at decode")
            ask_ninety = asyncio.create_task(router.ask(ninety, max_tokens=8))
            await eventually(lambda: cluster.load(sink).num_remote_kv, "the one of 90 waits at decode")
            answer_fifteen = await router.ask(fifteen, max_tokens=8)
            assert cluster.load(sink).blocks_in_use >= 29, "the long one ended too early to show anything"
            assert not ask_ninety.done()
            for _ in range(8):
                first.token_ids += (await anext(aiter(stream))).token_ids
            stream.cancel()  # its blocks are for the one of 90
            answer_ninety = await ask_ninety
        for prompt, answer in ((long_running, first), (ninety, answer_ninety), (fifteen, answer_fifteen)):
            oracle.check(prompt, answer.token_ids)
        computed = cluster.load(source).prompt_tokens_computed
        # a short prompt can be done before the receiver's `Want` arrives: then its last block is computed once more
        assert computed <= len(long_running) + len(ninety) + len(fifteen) + 16
        assert cluster.load(sink).prompt_tokens_computed == 0
        cluster.check_pools()
        cluster.check_logs()


@pytest.mark.slow
async def test_500_mixed_requests_with_clients_that_leave(small: Cluster) -> None:
    draw = random.Random(5)
    gate = asyncio.Semaphore(32)
    kept, left = 0, 0

    async def one(router: InferenceClient, number: int) -> None:
        nonlocal kept, left
        prompt = prompt_of(draw.choice((1, 7, 16, 40, 120)), number % 40)
        max_tokens = draw.choice((1, 2, 10, 40))
        patience = draw.choice((None, None, 0.0, 0.002, 0.02, 0.1))
        async with gate:
            call = router.start(prompt, max_tokens=max_tokens, temperature=draw.choice((0.0, 1.0)), seed=number)
            if patience is not None:
                await asyncio.sleep(patience)
                call.cancel()
            tokens = 0
            try:
                async for message in call:
                    tokens += len(message.token_ids)
            except asyncio.CancelledError:
                assert patience is not None
                left += 1
            else:
                assert tokens == max_tokens
                kept += 1

    async with InferenceClient(small.router.address) as router:
        await asyncio.gather(*(one(router, number) for number in range(500)))
        assert kept > 100
        assert left > 50
        small.check_pools()
        answer = await router.ask(prompt_of(30, 0), max_tokens=4)  # and it serves on
        assert len(answer.token_ids) == 4


async def test_bad_requests_are_named_and_the_cluster_serves_on(small: Cluster) -> None:
    limit = 24 * 16
    async with InferenceClient(small.router.address) as router:
        for prompt, sampling, named in (
            ([], {}, "empty"),
            (prompt_of(limit, 0), {"max_tokens": 1}, str(limit)),
            ([5, 100_000], {}, "100000"),
            ([5], {"temperature": float("nan")}, "temperature"),
            ([5], {"top_p": 1.5}, "top_p"),
            ([5], {"max_tokens": 0}, "max_tokens"),
            ([5], {"stop_token_ids": [99_999]}, "99999"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.ask(prompt, **sampling)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
            assert named in (caught.value.details() or "").replace(",", ""), caught.value.details()
        assert len((await router.ask([5, 6], max_tokens=3)).token_ids) == 3
