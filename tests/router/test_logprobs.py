"""Log-probabilities on their way to the client: first token from prefill, the rest from decode, in three formats."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
import openai
import pytest

from pdserve.common.net.rpc import ERROR_CODE_KEY, ERROR_FIELD_KEY
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import (
    ADMITTED,
    LANDED,
    PREFILL_ADMITTED,
    RELEASED,
    decode_outputs,
    first,
    play,
    token,
    tokens,
)

CHAT = [{"role": "user", "content": "hi"}]


def logprobs(*rows: Sequence[tuple[str, float]], ranks: Sequence[int]) -> request_pb2.Logprobs:
    """One row a token: (character, value), the sampled one first."""
    return request_pb2.Logprobs(
        width=len(rows[0]),
        token_ids=[token(char) for row in rows for char, _ in row],
        logprobs=[value for row in rows for _, value in row],
        sampled_ranks=ranks,
    )


FIRST = logprobs([("a", -0.5), ("a", -0.5), ("z", -1.5)], ranks=[1])
REST = logprobs([("b", -3.0), ("z", -0.25), ("y", -2.0)], [("c", -math.inf), ("c", -0.75), ("b", -1.0)], ranks=[7, 1])


def asked(call, full):
    """As many entries per token as the call asks for; None for a call that asks for none."""
    if call.request.sampling_params.logprobs is None:
        return None
    width = 1 + call.request.sampling_params.logprobs
    kept = [place for place in range(len(full.token_ids)) if place % full.width < width]
    return request_pb2.Logprobs(
        width=width,
        token_ids=[full.token_ids[place] for place in kept],
        logprobs=[full.logprobs[place] for place in kept],
        sampled_ranks=full.sampled_ranks,
    )


@pytest.fixture
async def served(cluster):
    """Says "a", "b" and "c", through prefill and decode, whatever is asked."""
    await cluster.start()
    cluster.of("prefill").script = play(
        PREFILL_ADMITTED,
        lambda worker, call: first("a", logprobs=asked(call, FIRST))(worker, call),
        RELEASED,
    )
    cluster.of("decode").script = play(
        ADMITTED,
        LANDED,
        lambda worker, call: decode_outputs(1, "bc", "length", logprobs=asked(call, REST)),
    )
    return cluster


async def test_an_answer_too_long_for_a_message_is_refused_as_such(served, monkeypatch):
    def ask(**fields):
        sampling = request_pb2.SamplingParams(max_tokens=3, logprobs=2)
        return served.grpc.Generate(
            inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="hi"), sampling=sampling, **fields)
        )

    with monkeypatch.context() as smaller:
        smaller.setattr("pdserve.router.grpc_front.generate_response.MAX_MESSAGE_BYTES", 200)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [response async for response in ask()]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 200 are allowed; ask for fewer logprobs" in str(refused.value.details())
    trailing = dict(refused.value.trailing_metadata())
    assert (trailing[ERROR_CODE_KEY], trailing[ERROR_FIELD_KEY]) == ("invalid_request", "sampling.logprobs")
    await served.idle()
    assert "".join([response.text async for response in ask()]) == "abc"


@pytest.fixture
async def client(served):
    client = openai.AsyncOpenAI(base_url=f"http://{served.addresses[0]}/v1", api_key="none", max_retries=0)
    yield client
    await client.close()


def written(entries):
    return [
        (entry.token, entry.logprob, bytes(entry.bytes), [(top.token, top.logprob) for top in entry.top_logprobs])
        for entry in entries
    ]


EXPECTED_CHAT = [
    ("a", -0.5, b"a", [("a", -0.5), ("z", -1.5)]),
    ("b", -3.0, b"b", [("z", -0.25), ("y", -2.0)]),
    ("c", -0.75, b"c", [("c", -0.75), ("b", -1.0)]),
]


async def test_chat(served, client):
    answer = await client.chat.completions.create(
        model="fake-model", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert written(answer.choices[0].logprobs.content) == EXPECTED_CHAT
    assert [worker.calls[0].request.sampling_params.logprobs for worker in served.workers] == [2, 2]
    stream = await client.chat.completions.create(
        model="fake-model", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    assert written([entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]) == (
        EXPECTED_CHAT
    )


async def test_chat_without_top_logprobs_names_the_sampled_token_alone(client):
    answer = await client.chat.completions.create(model="fake-model", messages=CHAT, max_tokens=3, logprobs=True)
    # JSON has no -inf
    assert written(answer.choices[0].logprobs.content) == [
        ("a", -0.5, b"a", []),
        ("b", -3.0, b"b", []),
        ("c", -9999.0, b"c", []),
    ]
    answer = await client.chat.completions.create(model="fake-model", messages=CHAT, max_tokens=3)
    assert answer.choices[0].logprobs is None


async def test_completions(client):
    answer = await client.completions.create(model="fake-model", prompt="hi", max_tokens=3, logprobs=2)
    expected = {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -3.0, -0.75],
        "top_logprobs": [{"a": -0.5, "z": -1.5}, {"b": -3.0, "z": -0.25, "y": -2.0}, {"c": -0.75, "b": -1.0}],
        "text_offset": [0, 1, 2],
    }
    assert answer.choices[0].logprobs.model_dump() == expected
    stream = await client.completions.create(model="fake-model", prompt="hi", max_tokens=3, logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs.model_dump() async for chunk in stream]
    assert {key: [value for part in parts for value in part[key]] for key in expected} == expected
    answer = await client.completions.create(model="fake-model", prompt="hi", max_tokens=3, logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {"b": -3.0}, {"c": -9999.0}]


@pytest.mark.parametrize("stream", [True, False])
async def test_grpc(served, stream):
    request = inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text="hi"),
        sampling=request_pb2.SamplingParams(max_tokens=3, logprobs=2),
        stream=stream,
    )
    responses = [response async for response in served.grpc.Generate(request)]
    entries = [entry for response in responses for entry in response.logprobs]
    assert [(entry.sampled.token_id, entry.sampled.rank) for entry in entries] == [
        (token("a"), 1),
        (token("b"), 7),
        (token("c"), 1),
    ]
    assert [[(top.token, top.logprob, top.rank) for top in entry.top] for entry in entries] == [
        [(b"a", -0.5, 1), (b"z", -1.5, 2)],
        [(b"z", -0.25, 1), (b"y", -2.0, 2)],
        [(b"c", -0.75, 1), (b"b", -1.0, 2)],
    ]
    assert responses[-1].cumulative_logprob == pytest.approx(-4.25)
    assert not any(response.HasField("cumulative_logprob") for response in responses[:-1])


async def test_a_stop_string_cuts_the_log_probabilities_too(client):
    answer = await client.completions.create(model="fake-model", prompt="hi", max_tokens=9, logprobs=1, stop="b")
    assert answer.choices[0].text == "a"
    assert answer.choices[0].logprobs.tokens == ["a", "b"]
    assert answer.choices[0].logprobs.text_offset == [0, 1]


async def test_tokens_by_their_ids(client):
    ids = {"extra_body": {"return_tokens_as_token_ids": True}}
    answer = await client.completions.create(model="fake-model", prompt="hi", max_tokens=3, logprobs=2, **ids)
    names = [f"token_id:{token(char)}" for char in "abc"]
    told = answer.choices[0].logprobs
    assert (told.tokens, told.text_offset) == (names, [0, 1, 2])
    assert told.top_logprobs[0] == {names[0]: -0.5, f"token_id:{token('z')}": -1.5}
    stream = await client.completions.create(
        model="fake-model", prompt="hi", max_tokens=3, logprobs=2, stream=True, **ids
    )
    parts = [chunk.choices[0].logprobs.tokens async for chunk in stream]
    assert [name for part in parts for name in part] == names
    answer = await client.chat.completions.create(
        model="fake-model", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2, **ids
    )
    assert [entry.token for entry in answer.choices[0].logprobs.content] == names
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == f"token_id:{token('z')}"


BROKEN = [
    None,
    request_pb2.Logprobs(),
    request_pb2.Logprobs(width=2, token_ids=tokens("ab"), logprobs=[-1.0], sampled_ranks=[1]),
    request_pb2.Logprobs(width=1, token_ids=tokens("ab"), logprobs=[-1.0, -1.0], sampled_ranks=[1, 1]),
    request_pb2.Logprobs(width=2**31, token_ids=tokens("a"), logprobs=[-1.0], sampled_ranks=[1]),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("broken", BROKEN, ids=["none", "empty", "short", "another-count", "wide"])
async def test_i9_a_worker_that_sends_none_or_nonsense_fails_that_request_alone(cluster, broken, caplog):
    await cluster.start(prefill=0)
    cluster.of("decode").script = play(ADMITTED, decode_outputs(0, "a", "length", logprobs=broken))
    response = await cluster.complete(max_tokens=1, logprobs=1)
    # it is the worker's fault, so another attempt is made
    assert response.status_code == 503
    assert "log-probabilities" in caplog.text
    cluster.of("decode").script = play(ADMITTED, decode_outputs(0, "a", "length", logprobs=FIRST))
    assert (await cluster.complete(max_tokens=1, logprobs=2)).json()["choices"][0]["logprobs"]["tokens"] == ["a"]
