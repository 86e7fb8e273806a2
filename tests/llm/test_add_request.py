"""`AsyncLLM.add_request`: a request whose answers its collector has, read or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from pdserve.common.errors import Cancelled, InvalidRequest
from pdserve.llm import (
    LLM,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from tests.llm.conftest import CheckedAsyncLLM
from tests.support.engine.llm_requests import TEXT, greedy
from tests.support.run.waiting import HANG_S

LONG = greedy(max_tokens=200)
Running = Callable[..., AbstractAsyncContextManager[CheckedAsyncLLM]]


async def answers_of(collector: RequestOutputCollector) -> list[RequestOutput]:
    answers: list[RequestOutput] = []
    while not answers or not answers[-1].finished:
        answer = await collector.get()
        assert isinstance(answer, RequestOutput)
        answers.append(answer)
    return answers


async def test_answers_are_those_of_generate(llm: LLM, running: Running) -> None:
    [expected] = llm.generate(TEXT, greedy(n=2, seed=1, temperature=0.7), use_tqdm=False)
    arrival = time.time() - 1.0
    async with running() as streams, asyncio.timeout(HANG_S):
        collector = await streams.add_request("mine", TEXT, greedy(n=2, seed=1, temperature=0.7), arrival)
        assert collector.request_id == "mine"
        *_, last = await answers_of(collector)
        assert (last.request_id, last.outputs) == ("mine", expected.outputs)
        assert last.metrics is not None
        assert last.metrics.arrival_time == arrival
        assert collector.get_nowait() is None
        with pytest.raises(RuntimeError, match="request mine has no more answers"):
            await collector.get()
        await streams.idle()
        assert streams._streams.is_empty


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_a_request_runs_while_nobody_reads(llm: LLM, running: Running, kind: RequestOutputKind) -> None:
    [expected] = llm.generate(TEXT, greedy(), use_tqdm=False)
    async with running() as streams, asyncio.timeout(HANG_S):
        collector = await streams.add_request("mine", TEXT, greedy(output_kind=kind))
        assert collector._task is not None
        await collector._task
        await streams.idle()
        answers = await answers_of(collector)
        texts = [answer.outputs[0].text for answer in answers]
        if kind is RequestOutputKind.DELTA:
            # how many there are depends on how often this loop ran meanwhile
            assert "".join(texts) == expected.outputs[0].text
        else:
            assert texts == [expected.outputs[0].text]


async def test_an_embedding(llm: LLM, running: Running) -> None:
    [expected] = llm.encode(TEXT, PoolingParams(normalize=None), use_tqdm=False)  # type: ignore[arg-type]
    async with running() as streams, asyncio.timeout(HANG_S):
        collector = await streams.add_request("mine", TEXT, PoolingParams())
        output = await collector.get()
        assert isinstance(output, PoolingRequestOutput)
        assert output.outputs.data == pytest.approx(expected.outputs.data, abs=1e-5)
        await streams.idle()


async def test_refusals_come_from_the_call(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"prompt": ""}, "prompt is empty"),
            ({"prompt": TEXT, "priority": 1}, "priority is 1, and requests run in order of arrival here"),
            ({"prompt": TEXT, "data_parallel_rank": 1}, "data_parallel_rank must be 0, not 1"),
            ({"prompt": TEXT, "params": PoolingParams(dimensions=65)}, "dimensions must be from 1 to 64"),
            ({}, "either prompt or prompt_token_ids is needed"),
        ]
        for fields, message in wrong:
            with pytest.raises(InvalidRequest, match=message):
                await streams.add_request("mine", **fields)
        kept = await streams.add_request("mine", prompt_token_ids=[5, 6], params=LONG)
        with pytest.raises(InvalidRequest, match="request_id is 'mine', which another request has now"):
            await streams.add_request("mine", TEXT)
        await streams.abort("mine")
        assert (await answers_of(kept))[-1].outputs[0].finish_reason in ("abort", "length")
        await streams.idle()


async def test_shutdown_ends_collectors(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        streams.step_by_hand()
        collector = await streams.add_request("mine", TEXT, LONG)
        reading = asyncio.create_task(answers_of(collector))
        posted = streams.watch_posts()
        stopping = asyncio.create_task(asyncio.to_thread(streams.shutdown))
        await posted.wait()
        streams.allow()  # what was posted comes before the next step
        await stopping
        with pytest.raises(Cancelled, match="was shut down"):
            await reading
