"""The order of a decode call's events: a transfer's end is told before any token that depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.client import process_client
from tests.support.engine.forked_engine import start_forked
from tests.support.run.waiting import HANG_S
from tests.support.transfers.worker_pair import KEY, Pair, calls, generation_request, running_pair

NUM_ANSWERS = 40
"""Of two tokens each: the engine answers within a step of the blocks' return, which is when the news is sent."""


@pytest.fixture(params=[False, True], ids=["thread", "process"])
async def pair(
    tiny_checkpoints: Callable[..., Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    monkeypatch.setattr(process_client, "start_program", start_forked)
    checkpoint = tiny_checkpoints("llama")
    async with running_pair(checkpoint, KEY, num_blocks=64, max_model_len=512, engine_process=request.param) as made:
        yield made


async def events_of(pair: Pair, prompt: list[int]) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    prefill, decode = calls(pair, generation_request(pair.d, prompt, sampling_params=params))

    async def names(call: Any) -> list[str]:
        return [event.WhichOneof("event") async for event in call]

    _, received = await asyncio.gather(names(prefill), names(decode))
    return [name for name in received if name in ("landed", "outputs")]


async def test_landed_comes_before_the_first_output(pair: Pair) -> None:
    """Without hits in the prefix cache, one after another and four at a time."""
    async with asyncio.timeout(HANG_S):
        for at_once in (1, 4):
            for first in range(0, NUM_ANSWERS, at_once):
                prompts = [[1 + at_once, *([number % 64] * 33)] for number in range(first, first + at_once)]
                for names in await asyncio.gather(*(events_of(pair, prompt) for prompt in prompts)):
                    assert names == ["landed", "outputs"]
