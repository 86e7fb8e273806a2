"""`AsyncLLM`: the answers of `LLM` as streams, and streams that end early leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import Cancelled, InvalidRequest, WorkerLost
from pdserve.llm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, StreamingInput
from tests.support.engine.llm_requests import MESSAGES, TEXT, core_of, greedy, prompts_of, sampled
from tests.support.run.waiting import HANG_S

Running = Callable[..., Any]
LONG = greedy(max_tokens=200)


async def last_of(llm: AsyncLLM, *request: Any) -> RequestOutput:
    """The whole answer; what comes before must be its beginnings."""
    so_far: list[int] = []
    async for answer in llm.generate(*request):
        assert answer.outputs[0].token_ids[: len(so_far)] == so_far
        assert len(answer.outputs[0].token_ids) > len(so_far) or answer.finished
        so_far = answer.outputs[0].token_ids
    assert answer.finished
    return answer


async def test_answers_are_those_of_llm(running: Running, llm: LLM) -> None:
    prompts = prompts_of([1, 6, 33, 70])
    params = [greedy(), sampled(seed=1), greedy(stop_token_ids=(7, 9)), sampled(seed=2, temperature=2.0)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    async with running() as streams, asyncio.timeout(HANG_S):
        answers = await asyncio.gather(*(last_of(streams, *request) for request in zip(prompts, params, strict=True)))
        assert [answer.outputs for answer in answers] == [answer.outputs for answer in expected]
        [one] = llm.chat(MESSAGES, greedy(), use_tqdm=False)
        async for answer in streams.chat(MESSAGES, greedy()):
            last = answer
        assert (last.prompt, last.outputs) == (one.prompt, one.outputs)
        await streams.idle()


async def test_the_only_engine_has_rank_0(running: Running) -> None:
    async def turns() -> AsyncGenerator[StreamingInput, None]:
        yield StreamingInput(TEXT)

    async with running() as streams, asyncio.timeout(HANG_S):
        async for answer in streams.generate(TEXT, greedy(), data_parallel_rank=0):
            last = answer
        assert last.finished
        for rank in (1, -1, True, "0"):
            for prompt in (TEXT, turns()):
                with pytest.raises(InvalidRequest, match=f"data_parallel_rank must be 0, not {rank!r}"):
                    await anext(streams.generate(prompt, greedy(), data_parallel_rank=rank))
        await streams.idle()


async def test_logprobs_grow_with_the_answer(running: Running, llm: LLM) -> None:
    [expected] = llm.generate(TEXT, greedy(logprobs=2), use_tqdm=False)[0].outputs
    async with running() as streams, asyncio.timeout(HANG_S):
        async for answer in streams.generate(TEXT, greedy(logprobs=2)):
            [sequence] = answer.outputs
            assert [*map(set, sequence.logprobs or ())] == [*map(set, expected.logprobs or ())][
                : len(sequence.token_ids)
            ]
        # batches of other shapes may round the last digit otherwise
        assert sequence.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


@pytest.mark.slow
async def test_a_tiny_pool_preempts_and_changes_no_stream(running: Running, llm: LLM) -> None:
    prompts = prompts_of([20, 25, 30, 22])
    expected = llm.generate(prompts, greedy(max_tokens=40), use_tqdm=False)
    async with running(num_blocks=24, max_model_len=80) as streams, asyncio.timeout(HANG_S):
        answers = await asyncio.gather(*(last_of(streams, prompt, greedy(max_tokens=40)) for prompt in prompts))
        assert [answer.outputs for answer in answers] == [answer.outputs for answer in expected]
        assert core_of(streams).scheduler.num_preemptions > 0
        await streams.idle()


async def test_a_stop_string_ends_the_stream_and_its_request(running: Running, llm: LLM) -> None:
    [whole] = llm.generate(TEXT, greedy(), use_tqdm=False)
    stop = whole.outputs[0].text[6:8]
    params = greedy(stop=(stop,), max_tokens=200)
    [expected] = llm.generate(TEXT, params, use_tqdm=False)
    async with running() as streams, asyncio.timeout(HANG_S):
        answer = await last_of(streams, TEXT, params)
        assert answer.outputs == expected.outputs
        assert answer.outputs[0].stop_reason == stop
        await streams.idle()


async def test_i2_a_stream_that_is_left_early_leaves_the_pool_whole(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        streams.step_by_hand()
        left, cancelled, other = prompts_of([50, 30, 40])
        async with aclosing(streams.generate(left, LONG)) as stream:
            streams.allow(1)
            assert not (await anext(stream)).finished
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in streams.generate(cancelled, LONG):
                has_begun.set()

        task = asyncio.create_task(read())
        streams.allow(2)  # the first request may have had a step under way
        await has_begun.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        streams.allow()
        assert len((await last_of(streams, other, greedy())).outputs[0].token_ids) == 12
        await streams.idle()
        assert streams._streams.is_empty


async def test_abort_ends_the_stream_with_what_it_has(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        streams.step_by_hand()
        streams.allow(1)
        async for answer in streams.generate(TEXT, LONG, "mine"):
            assert answer.request_id == "mine"
            await streams.abort("mine")
            streams.allow()
        assert answer.finished
        assert answer.outputs[0].finish_reason == "abort"
        assert 1 <= len(answer.outputs[0].token_ids) <= 2
        await streams.abort("mine")
        await streams.abort("nobody's")
        await streams.idle()


async def test_a_name_is_used_once_at_a_time(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        async with aclosing(streams.generate(TEXT, LONG, "mine")) as stream:
            await anext(stream)
            with pytest.raises(InvalidRequest, match="request_id is 'mine'"):
                await last_of(streams, TEXT, greedy(), "mine")
        # the first is still being aborted: none of its outputs may reach the second
        assert len((await last_of(streams, TEXT, greedy(), "mine")).outputs[0].token_ids) == 12
        await streams.idle()


async def test_a_wrong_request_is_refused_before_the_engine_hears_of_it(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        for prompt, params, field in (
            ([5, 320], None, "prompt"),
            ("", None, "prompt"),
            (TEXT, SamplingParams(top_p=2), "top_p"),
            (TEXT, SamplingParams(max_tokens=1000), "max_tokens"),
            (TEXT, {"temperature": 0}, "sampling_params"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await last_of(streams, prompt, params)
            assert caught.value.field == field
        assert not core_of(streams).scheduler.requests
        assert (await last_of(streams, TEXT, greedy())).finished


async def test_shutdown_ends_every_stream_and_takes_no_more(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):
        streams.step_by_hand()
        streams.allow(1)
        async with aclosing(streams.generate(TEXT, LONG)) as stream:
            await anext(stream)
            posted = streams.watch_posts()
            waiting = asyncio.create_task(last_of(streams, prompts_of([40])[0], LONG))
            await posted.wait()
            posted.clear()
            ending = asyncio.create_task(asyncio.to_thread(streams.shutdown))
            await posted.wait()
            streams.allow()  # what was posted comes before the next step
            with pytest.raises(Cancelled, match="shut down"):
                async for _ in stream:
                    pass
            with pytest.raises(Cancelled, match="shut down"):
                await waiting
            await ending
        assert not streams.is_running
        with pytest.raises(Cancelled, match="shut down"):
            await last_of(streams, TEXT, greedy())
        streams.shutdown()


async def test_an_engine_that_fails_ends_every_stream(running: Running) -> None:
    async with running() as streams, asyncio.timeout(HANG_S):

        def fail(*_: Any) -> None:
            raise ValueError("a bug in a kernel")

        core_of(streams).executor.execute_model = fail  # type: ignore[assignment, method-assign]
        asked = [last_of(streams, prompt, LONG) for prompt in prompts_of([8, 40])]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, WorkerLost)
        with pytest.raises(WorkerLost, match="log has the details"):
            await last_of(streams, TEXT, greedy())
        assert not streams.is_running


def test_it_belongs_to_one_event_loop(folder: Path) -> None:
    llm = AsyncLLM(folder, num_blocks=64)
    try:
        assert asyncio.run(last_of(llm, TEXT, greedy())).finished
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(last_of(llm, TEXT, greedy()))
    finally:
        llm.shutdown()


def test_one_that_served_nobody_can_be_shut_down(folder: Path) -> None:
    llm = AsyncLLM(folder, num_blocks=64)
    assert llm.is_running
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.get_tokenizer().vocab_size == 320
    llm.shutdown()
    assert not llm.is_running


async def test_deltas_and_the_end_alone(running: Running, llm: LLM) -> None:
    params = greedy(max_tokens=20)
    [expected] = llm.generate(TEXT, params, use_tqdm=False)[0].outputs
    async with running() as streams, asyncio.timeout(HANG_S):
        texts, tokens = [], []
        async for answer in streams.generate(TEXT, greedy(max_tokens=20, output_kind=RequestOutputKind.DELTA)):
            [delta] = answer.outputs
            texts.append(delta.text)
            tokens += delta.token_ids
        assert ("".join(texts), tokens) == (expected.text, expected.token_ids)
        assert len(texts) > 1
        assert answer.finished
        final = greedy(max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
        [answer] = [answer async for answer in streams.generate(TEXT, final)]
        assert answer.outputs == [expected]


async def test_fields_beside_the_prompt_reach_the_engine(running: Running) -> None:
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    async with running(scheduling_policy="priority") as streams, asyncio.timeout(HANG_S):
        added = []
        core = core_of(streams)
        add = core.add_request

        def noted(request: Any) -> None:
            added.append(request)
            add(request)

        core.add_request = noted  # type: ignore[method-assign]
        async for _ in streams.generate(TEXT, greedy(), priority=3, speculative_tokens=0, trace_headers=headers):
            pass
        async for _ in streams.chat(MESSAGES, greedy(), priority=-3, trace_headers=headers):
            pass
        assert [(request.priority, request.trace_headers) for request in added] == [(3, headers), (-3, headers)]
        assert [request.speculative_tokens for request in added] == [0, None]
        with pytest.raises(InvalidRequest, match="priority must be from"):
            async for _ in streams.generate(TEXT, greedy(), priority=2**31):
                pass
        await streams.idle()
