"""`AsyncLLM.generate` with streaming input: turns on one sequence, as `LLM` answers the whole text so far."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.engine.client import process_client
from pdserve.llm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, StreamingInput, StructuredOutputsParams
from tests.llm.conftest import TINY
from tests.support.engine.forked_engine import start_forked
from tests.support.engine.llm_requests import greedy, prompts_of
from tests.support.run.waiting import HANG_S

Running = Callable[..., Any]
PROMPTS = prompts_of([9, 4, 7])


async def inputs_of(*turns: StreamingInput) -> AsyncIterator[StreamingInput]:
    for turn in turns:
        yield turn


async def answers_of(llm: AsyncLLM, inputs: AsyncIterator[StreamingInput], **fields: Any) -> list[RequestOutput]:
    """The last item of each turn."""
    ended: list[RequestOutput] = []
    async for answer in llm.generate(inputs, **fields):
        if answer.outputs and answer.outputs[0].finish_reason is not None:
            if ended and answer.finished and answer.outputs[0] == ended[-1].outputs[0]:
                ended.pop()
            ended.append(answer)
    assert [answer.finished for answer in ended] == [False] * (len(ended) - 1) + [True]
    return ended


def expected_of(llm: LLM, prompts: list[list[int]], params: list[Any]) -> list[RequestOutput]:
    """The same turns, each as a request with everything before it."""
    tokens: list[int] = []
    answers = []
    for prompt, each in zip(prompts, params, strict=True):
        [answer] = llm.generate([*tokens, *prompt], each, use_tqdm=False)
        answers.append(answer)
        tokens += [*prompt, *answer.outputs[0].token_ids]
    return answers


async def test_turns_that_come_at_once_are_answered_in_turn(running: Running, llm: LLM) -> None:
    params = [greedy(max_tokens=5), greedy(max_tokens=12, logprobs=1), greedy(max_tokens=1)]
    expected = expected_of(llm, PROMPTS, params)
    turns = [StreamingInput(*each) for each in zip(PROMPTS, params, strict=True)]
    async with running() as streams, asyncio.timeout(HANG_S):
        answers = await answers_of(streams, inputs_of(*turns))
        await streams.idle()
    assert [answer.outputs[0].token_ids for answer in answers] == [each.outputs[0].token_ids for each in expected]
    assert [answer.prompt_token_ids for answer in answers] == [each.prompt_token_ids for each in expected]
    assert answers[1].outputs[0].logprobs is not None


async def test_stop_strings_end_a_turn_and_what_follows_them_is_forgotten(running: Running, llm: LLM) -> None:
    [long] = llm.generate(PROMPTS[0], greedy(max_tokens=40), use_tqdm=False)
    stop = next(text for text in re.findall(r"\S{2,}", long.outputs[0].text) if long.outputs[0].text.find(text) > 8)
    params = [greedy(max_tokens=40, stop=(stop,)), greedy(max_tokens=6), greedy(max_tokens=2)]
    expected = expected_of(llm, PROMPTS, params)
    turns = [StreamingInput(*each) for each in zip(PROMPTS, params, strict=True)]
    async with running() as streams, asyncio.timeout(HANG_S):
        answers = await answers_of(streams, inputs_of(*turns))
        await streams.idle()
    assert answers[0].outputs[0].stop_reason == stop
    assert [answer.outputs[0].text for answer in answers] == [each.outputs[0].text for each in expected]


@pytest.mark.slow
async def test_each_turn_may_have_a_form_and_prompt_logprobs(running: Running, llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[ab]{3}")
    params = [
        greedy(max_tokens=3, prompt_logprobs=0),
        greedy(max_tokens=20, structured_outputs=form),
        greedy(max_tokens=4, prompt_logprobs=2),
    ]
    expected = expected_of(llm, PROMPTS, params)
    turns = [StreamingInput(*each) for each in zip(PROMPTS, params, strict=True)]
    async with running() as streams, asyncio.timeout(HANG_S):
        answers = await answers_of(streams, inputs_of(*turns))
        await streams.idle()
    assert re.fullmatch("[ab]{3}", answers[1].outputs[0].text)
    assert [answer.outputs[0].token_ids for answer in answers] == [each.outputs[0].token_ids for each in expected]
    first, last = answers[0].prompt_logprobs, answers[2].prompt_logprobs
    assert first is not None
    assert last is not None
    assert [each is None for each in first] == [True] + [False] * (len(PROMPTS[0]) - 1)
    num_before = len(expected[2].prompt_token_ids) - len(PROMPTS[2])
    assert [each is None for each in last] == [True] * num_before + [False] * len(PROMPTS[2])
    for got, known in zip(last[num_before:], (expected[2].prompt_logprobs or [])[num_before:], strict=True):
        assert got is not None
        assert known is not None
        assert list(got) == list(known)
        for token_id, candidate in got.items():
            assert candidate.logprob == pytest.approx(known[token_id].logprob, abs=1e-4)


async def test_input_that_comes_later_waits_for_nobody(running: Running, llm: LLM) -> None:
    params = [greedy(max_tokens=4, output_kind=RequestOutputKind.DELTA)] * 3
    expected = expected_of(llm, PROMPTS, params)
    asked = asyncio.Event()

    async def slow() -> AsyncIterator[StreamingInput]:
        for prompt in PROMPTS:
            yield StreamingInput(prompt)
            await asked.wait()
            asked.clear()

    tokens: list[int] = []
    async with running() as streams, asyncio.timeout(HANG_S):
        async for answer in streams.generate(slow(), params[0]):
            tokens += [token for output in answer.outputs for token in output.token_ids]
            if len(tokens) % 4 == 0:
                asked.set()
        await streams.idle()
    assert tokens == [token for each in expected for token in each.outputs[0].token_ids]
    assert answer.finished


async def test_a_session_that_is_left_or_whose_input_fails_is_over(running: Running) -> None:
    async def endless() -> AsyncIterator[StreamingInput]:
        while True:
            yield StreamingInput([5, 6], greedy(max_tokens=3))

    async def failing(what: Any) -> AsyncIterator[StreamingInput]:
        yield StreamingInput([5, 6], greedy(max_tokens=3))
        if isinstance(what, Exception):
            raise what
        yield what

    async with running() as llm, asyncio.timeout(HANG_S):
        async with aclosing(llm.generate(endless(), request_id="s")) as stream:
            async for answer in stream:
                if answer.outputs[0].finish_reason is not None:
                    break
        await llm.idle()
        wrong: list[tuple[Any, type[Exception], str]] = [
            (ValueError("mine"), ValueError, "mine"),
            (StreamingInput([5], greedy(top_p=2.0)), InvalidRequest, "top_p must be"),
            (StreamingInput([5], greedy(n=2)), InvalidRequest, "n is above 1, but a session has one sequence"),
            (StreamingInput({"prompt": "a", "cache_salt": "b"}, greedy()), InvalidRequest, "cache_salt may only come"),
            (StreamingInput([5] * 251, greedy(max_tokens=1)), PromptTooLong, "at most 255 leave room for one more"),
        ]
        for what, kind, message in wrong:
            with pytest.raises(kind, match=message):
                async for _ in llm.generate(failing(what), request_id="s"):
                    pass
            await llm.idle()
        with pytest.raises(InvalidRequest, match="prompt has no input"):
            async for _ in llm.generate(inputs_of(), request_id="s"):
                pass
        await llm.idle()


async def test_a_session_in_an_engine_of_its_own_process(
    folder: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "start_program", start_forked)
    params = [greedy(max_tokens=5), greedy(max_tokens=7)]
    expected = expected_of(llm, PROMPTS[:2], params)
    turns = [StreamingInput(*each) for each in zip(PROMPTS, params, strict=False)]
    async with AsyncLLM(folder, engine_process=True, **TINY) as apart, asyncio.timeout(HANG_S):
        answers = await answers_of(apart, inputs_of(*turns))
        assert await apart._client.utility_async("check_pool") is True
    assert [answer.outputs[0].token_ids for answer in answers] == [each.outputs[0].token_ids for each in expected]
