"""`LLM.embed` and `AsyncLLM.embed`, by transformers' last hidden states in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import torch

from pdserve.common.errors import Cancelled, InvalidRequest
from pdserve.llm import LLM, EmbeddingRequestOutput, PoolingOutput, PoolingParams
from tests.llm.conftest import CheckedAsyncLLM
from tests.support.engine.llm_requests import TEXT, greedy, prompts_of
from tests.support.models.oracle import Oracle
from tests.support.run.waiting import HANG_S

MEAN = PoolingParams(pooling_type="mean", normalize=False, dimensions=20)


def check(oracle: Oracle, output: EmbeddingRequestOutput, params: PoolingParams) -> None:
    states = oracle.hidden_states(output.prompt_token_ids)
    expected = (states[-1] if params.pooling_type == "last" else states.mean(0))[: params.dimensions]
    expected = expected / expected.norm() if params.normalize else expected
    assert output.finished
    assert output.outputs.hidden_size == len(expected)
    assert float((torch.tensor(output.outputs.embedding) - expected).abs().max()) < 1e-4


def test_a_batch(llm: LLM, oracle: Oracle) -> None:
    prompts: list[Any] = [*prompts_of([3, 70]), TEXT, {"prompt": TEXT, "cache_salt": "mine"}]
    params = [PoolingParams(), MEAN, PoolingParams(dimensions=3), MEAN]
    outputs = llm.embed(prompts, params, use_tqdm=False)
    for output, each in zip(outputs, params, strict=True):
        check(oracle, output, each)
    assert [output.prompt for output in outputs] == [None, None, TEXT, TEXT]
    assert len({output.request_id for output in outputs}) == 4


def test_one_prompt_and_the_engine_afterwards(llm: LLM, oracle: Oracle) -> None:
    [first] = llm.embed(TEXT, use_tqdm=False)
    [again] = llm.embed(TEXT, use_tqdm=False)
    check(oracle, first, PoolingParams())
    check(oracle, again, PoolingParams())
    assert (first.num_cached_tokens, again.num_cached_tokens > 0) == (0, True)
    [prompt] = prompts_of([12])
    [answer] = llm.generate(prompt, greedy(), use_tqdm=False)
    oracle.check(prompt, answer.outputs[0].token_ids)


def test_a_pool_too_small_for_all_at_once(make_llm: Callable[..., LLM], oracle: Oracle) -> None:
    small = make_llm(num_blocks=16, max_model_len=64)
    for output in small.embed(prompts_of([60, 64, 40, 30]), MEAN, use_tqdm=False):
        check(oracle, output, MEAN)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "prompt is empty"),
        ([TEXT, [400]], None, r"prompts\[1\]: prompt\[0\] is 400"),
        ([3] * 257, None, "prompt has 257 tokens; the model's length is 256"),
        (TEXT, PoolingParams(dimensions=65), "dimensions must be from 1 to 64, the model's hidden size, not 65"),
        (TEXT, PoolingParams(dimensions="8"), "dimensions is '8'"),  # type: ignore[arg-type]
        (TEXT, PoolingParams(pooling_type="max"), "pooling_type is 'max'"),  # type: ignore[arg-type]
        (TEXT, greedy(), "pooling_params must be PoolingParams or a list of them, not SamplingParams"),
        ([TEXT], [PoolingParams()] * 2, "pooling_params has 2 entries, one for each of 1 prompts"),
    ],
)
def test_refusals(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.embed(prompts, params, use_tqdm=False)


Running = Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]]


async def test_beside_streams(running: Running, oracle: Oracle) -> None:
    async with running() as llm:

        async def generate(prompt: list[int]) -> list[int]:
            async for answer in llm.generate(prompt, greedy(max_tokens=30)):
                tokens = answer.outputs[0].token_ids
            return tokens

        prompts = prompts_of([5, 20])
        streams = [asyncio.create_task(generate(prompt)) for prompt in prompts]
        embedded = await asyncio.gather(*(llm.embed(prompt, MEAN) for prompt in prompts_of([9, 90])), llm.embed(TEXT))
        for output, params in zip(embedded, (MEAN, MEAN, PoolingParams()), strict=True):
            check(oracle, output, params)
        for prompt, stream in zip(prompts, streams, strict=True):
            oracle.check(prompt, await stream)


async def test_ends_before_its_time(running: Running) -> None:
    async with running() as llm:
        await llm.embed(TEXT)
        llm.step_by_hand()
        # of several chunks: each request is in the middle of its prompt when it ends
        [prompt] = prompts_of([200])
        asked = asyncio.create_task(llm.embed(prompt, request_id="one"))
        posted = llm.watch_posts()
        await posted.wait()
        with pytest.raises(InvalidRequest, match="request_id is 'one', which another request has now"):
            await llm.embed(TEXT, request_id="one")
        await llm.abort("one")
        llm.allow()
        with pytest.raises(Cancelled, match="request one was aborted"):
            await asked
        left = asyncio.create_task(llm.embed(prompt, request_id="one"))
        posted.clear()
        await posted.wait()
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await llm.idle()


async def test_encode_gives_the_general_type(llm: LLM, running: Running) -> None:
    [embedding] = llm.embed(TEXT, MEAN, use_tqdm=False)
    [pooled] = llm.encode(TEXT, MEAN, use_tqdm=False)
    assert pooled.outputs.data == pytest.approx(embedding.outputs.embedding, abs=1e-5)
    assert (pooled.prompt, pooled.finished, pooled.outputs) == (TEXT, True, PoolingOutput(data=pooled.outputs.data))
    async with running() as streams, asyncio.timeout(HANG_S):
        [streamed] = [output async for output in streams.encode(TEXT, MEAN)]
        assert streamed.outputs.data == pytest.approx(embedding.outputs.embedding, abs=1e-5)
        await streams.idle()
