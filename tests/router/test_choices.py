"""Several sequences of one prompt, and the best of several, over both front ends."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import (
    ADMITTED,
    LANDED,
    PREFILL_ADMITTED,
    RELEASED,
    TEXT,
    computed,
    decode_outputs,
    forever,
    outputs,
    play,
    said,
    token,
)
from tests.support.run.waiting import HANG_S


@pytest.fixture
async def served(cluster):
    return await cluster.start()


@pytest.fixture
async def client(served):
    client = openai.AsyncOpenAI(base_url=f"http://{served.addresses[0]}/v1", api_key="none", max_retries=0)
    yield client
    await client.close()


async def test_openai_client_gets_n_choices(served, client):
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=5, n=3)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(i, said(5, i), "length") for i in range(3)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 15)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    for worker in served.workers:
        [call] = worker.calls
        assert call.request.sampling_params.n == 3
        assert call.request.sampling_params.best_of is None
    messages = [{"role": "user", "content": "hi"}]
    chat = await client.chat.completions.create(model="fake-model", messages=messages, max_tokens=4, n=2)
    assert [(c.index, c.message.content) for c in chat.choices] == [(0, said(4)), (1, said(4, 1))]


async def test_openai_client_streams_n_choices(client):
    messages = [{"role": "user", "content": "hi"}]
    stream = await client.chat.completions.create(
        model="fake-model", messages=messages, max_tokens=5, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    roles: dict[int, Any] = {}
    reasons: dict[int, Any] = {}
    usages: list[Any] = []
    async for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            assert choice.index not in reasons, "a choice goes on after its end"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.delta.role:
                roles[choice.index] = choice.delta.role
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {index: said(5, index) for index in range(3)}
    assert roles == dict.fromkeys(range(3), "assistant")
    assert reasons == dict.fromkeys(range(3), "length")
    assert [usage.completion_tokens for usage in usages] == [15]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_stand_side_by_side(client, stream):
    answer = await client.completions.create(
        model="fake-model", prompt=["a", "bb", "ccc"], max_tokens=3, n=2, stream=stream
    )
    texts: dict[int, str] = {}
    for choice in [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices:
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {prompt * 2 + index: said(3, index) for prompt in range(3) for index in range(2)}


async def test_one_token_each_comes_from_prefill_alone(served, client):
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=1, n=4)
    assert [choice.text for choice in answer.choices] == list(TEXT[:4])
    assert not served.of("decode").calls


@pytest.mark.parametrize("stream", [False, True])
async def test_grpc_gives_usage_with_the_last_message_of_all(served, stream):
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=[1, 2]),
        sampling=request_pb2.SamplingParams(max_tokens=4, n=3),
        stream=stream,
    )
    responses = [response async for response in served.grpc.Generate(request, timeout=HANG_S)]
    texts: dict[int, str] = {}
    for response in responses:
        texts[response.index] = texts.get(response.index, "") + response.text
    assert texts == {index: said(4, index) for index in range(3)}
    assert [response.HasField("usage") for response in responses] == [False] * (len(responses) - 1) + [True]
    assert (responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens) == (2, 12)
    ends = [response for response in responses if response.finish_reason]
    assert [response.index for response in ends] == [0, 1, 2]
    assert all(response.finish_reason == request_pb2.FINISH_REASON_LENGTH for response in ends)


def steps(positions, indexes, finish=None):
    return [decode_outputs(p, said(1, i + p), finish, index=i) for p in positions for i in indexes]


def told_by_router(decode):
    """The router's messages about ended sequences, and a step that waits until there are more."""
    told = []

    async def until_told(worker, call):
        told.append(await asyncio.wait_for(decode.ended_sequences.get(), HANG_S))

    return told, until_told


async def test_a_stop_string_ends_its_own_sequence_here_and_at_decode(served, client):
    decode = served.of("decode")
    told, until_told = told_by_router(decode)
    # sequence 2 says f with its fourth token, sequence 1 with its last, sequence 0 never
    late = decode_outputs(4, "g", index=2), decode_outputs(5, "", "stop", index=2)
    decode.script = play(
        ADMITTED, LANDED, *steps((1, 2, 3), (0, 1, 2)), until_told, *late, *steps((4,), (0, 1), "length")
    )
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=5, n=3, stop="f")
    ends = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in answer.choices]
    assert ends == [("abcde", "length", None), ("bcde", "stop", "f"), ("cde", "stop", "f")]
    assert answer.usage.completion_tokens == 5 + 5 + 4
    [ended] = told
    assert ended == (decode.calls[0].request.request_id, 0, [2], None)
    assert decode.ended_sequences.empty(), "decode was told twice, or of a sequence that ended there"


async def test_a_first_token_that_ends_its_sequence_leaves_the_others(served, client):
    decode = served.of("decode")
    told, until_told = told_by_router(decode)
    decode.script = play(ADMITTED, until_told, LANDED, *steps((1,), (0, 1)), forever)
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=9, n=2, stop=["b", "c"])
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("a", "stop"), ("", "stop")]
    assert [list(ended.indexes) for ended in told] == [[1]]
    await asyncio.wait_for(decode.calls[0].cancelled.wait(), HANG_S)


async def test_all_sequences_that_end_at_prefill_end_both_calls(served, client):
    served.of("prefill").script = play(
        PREFILL_ADMITTED,
        lambda worker, call: computed(call.request, *(outputs(0, said(1, i), "stop", index=i) for i in range(3))),
        forever,
    )
    served.of("decode").script = play(ADMITTED, forever)
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=9, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for worker in served.workers:
        await asyncio.wait_for(worker.calls[0].cancelled.wait(), HANG_S)


def likely(char, value):
    return request_pb2.Logprobs(width=1, token_ids=[token(char)], logprobs=[value], sampled_ranks=[1])


LIKELIHOODS = {0: (-1.0, -2.0), 1: (-0.5, -0.5), 2: (-3.0, -0.1), 3: (-0.5, -0.5)}


@pytest.fixture
async def judged(served):
    """Two tokens of each of four sequences, of which 1 and 3 are equally likely, then 0, then 2."""

    def firsts(worker, call):
        return computed(
            call.request,
            *(outputs(0, said(1, i), logprobs=likely(said(1, i), v), index=i) for i, (v, _) in LIKELIHOODS.items()),
        )

    served.of("prefill").script = play(PREFILL_ADMITTED, firsts, RELEASED)
    rest = [
        decode_outputs(1, said(1, i + 1), "length", logprobs=likely(said(1, i + 1), v), index=i)
        for i, (_, v) in LIKELIHOODS.items()
    ]
    served.of("decode").script = play(ADMITTED, LANDED, *rest)
    return served


async def test_best_of_answers_the_likeliest(judged, client):
    answer = await client.completions.create(model="fake-model", prompt="hello", max_tokens=2, n=3, best_of=4)
    assert [(c.index, c.text) for c in answer.choices] == [(0, said(2, 1)), (1, said(2, 3)), (2, said(2))]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == 8
    sampling = judged.of("decode").calls[0].request.sampling_params
    assert (sampling.n, sampling.best_of, sampling.logprobs) == (4, None, 0)


async def test_best_of_over_grpc_with_log_probabilities(judged):
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=[1, 2]),
        sampling=request_pb2.SamplingParams(max_tokens=2, best_of=4, logprobs=0),
    )
    [response] = [response async for response in judged.grpc.Generate(request, timeout=HANG_S)]
    assert (response.index, response.text, response.cumulative_logprob) == (0, said(2, 1), -1.0)
    assert [entry.sampled.logprob for entry in response.logprobs] == [-0.5, -0.5]
    assert response.usage.completion_tokens == 8


async def test_a_request_holds_a_place_for_each_sequence(cluster):
    await cluster.start(max_running_requests=4)
    decode = cluster.of("decode")
    decode.scripts = [play(ADMITTED, LANDED, forever)]
    first = asyncio.create_task(cluster.complete(n=3, max_tokens=4))
    await decode.called()
    second = asyncio.create_task(cluster.complete(n=2, max_tokens=4))
    await cluster.queued(1)
    assert len(decode.calls) == 1
    first.cancel()
    assert len((await second).json()["choices"]) == 2
