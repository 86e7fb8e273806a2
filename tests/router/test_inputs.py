"""What clients may send, over both front ends: each refusal names the field, its value and its limit."""

from __future__ import annotations

import json

import grpc
import pytest
from fake_worker import EOS, MAX_MODEL_LEN, VOCAB_SIZE, said, tokens

from pdserve.common.rpc import ERROR_CODE_KEY
from pdserve.v1 import inference_pb2, request_pb2

HTTP_REFUSALS = [
    ("completions", {"prompt": ""}, "prompt", "prompt is empty"),
    ("completions", {"prompt": []}, "prompt", "prompt is empty"),
    ("completions", {"prompt": [[]]}, "prompt", "prompt is empty"),
    ("completions", {"prompt": ["a", ""]}, "prompt[1]", "prompt[1] is empty"),
    ("completions", {"prompt": ["a", 1]}, "prompt", "mixes kinds"),
    ("completions", {"prompt": [1, 2.5]}, "prompt", "prompt[1]: expected"),
    ("completions", {}, "prompt", "prompt is missing"),
    ("completions", {"prompt": "x" * 256}, "prompt", "prompt has 256 tokens; the model's length is 256"),
    ("completions", {"prompt": "x" * 250, "max_tokens": 7}, "max_tokens", "max_tokens is 7 and prompt has 250 tokens"),
    ("completions", {"prompt": [5, VOCAB_SIZE]}, "prompt", f"prompt[1] is {VOCAB_SIZE}, outside the vocabulary"),
    ("completions", {"prompt": [-1]}, "prompt", "prompt[0] is -1"),
    ("completions", {"prompt": [2**40]}, "prompt", "outside the vocabulary"),
    ("completions", {"prompt": "x", "temprature": 1}, "temprature", "temprature is not a known field"),
    ("completions", {"prompt": "x", "temperature": "hot"}, "temperature", "temperature: expected"),
    ("completions", {"prompt": "x", "temperature": True}, "temperature", "temperature: expected"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature", "temperature must be from 0 to 100, not -1"),
    ("completions", {"prompt": "x", "temperature": float("nan")}, "temperature", "must be a finite number"),
    ("completions", {"prompt": "x", "top_p": float("inf")}, "top_p", "must be a finite number"),
    ("completions", {"prompt": "x", "top_p": 0}, "top_p", "top_p must be above 0"),
    ("completions", {"prompt": "x", "top_k": -2}, "top_k", "top_k must be"),
    ("completions", {"prompt": "x", "top_k": 1.5}, "top_k", "top_k: expected `int"),
    ("completions", {"prompt": "x", "min_p": 2}, "min_p", "min_p must be"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    ("completions", {"prompt": "x", "max_tokens": -5}, "max_tokens", "max_tokens must be at least 1"),
    ("completions", {"prompt": "x", "max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens (2)"),
    ("completions", {"prompt": "x", "n": 0}, "n", "n must be from 1 to 16, not 0"),
    ("completions", {"prompt": "x", "n": 17}, "n", "n must be from 1 to 16, not 17"),
    ("completions", {"prompt": "x", "n": "2"}, "n", "expected `int"),
    ("completions", {"prompt": "x", "n": 3, "best_of": 2}, "best_of", "at least n (3) and at most 16, not 2"),
    ("completions", {"prompt": "x", "best_of": 17}, "best_of", "at least n (1) and at most 16, not 17"),
    ("completions", {"prompt": "x", "best_of": 3, "stream": True}, "best_of", "stream must be false"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": -1}, "n", "n must be from 1 to 16"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "best_of": 2}, "best_of", "not a known"),
    ("completions", {"prompt": "x", "echo": True}, "echo", "only false is supported"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "logprobs must be from 0 to 20, not 21"),
    ("completions", {"prompt": "x", "logprobs": -1}, "logprobs", "logprobs must be from 0 to 20, not -1"),
    ("completions", {"prompt": "x", "logprobs": True}, "logprobs", "expected `int"),
    ("completions", {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs is 1, but only"),
    ("completions", {"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty", "must be from -2 to 2, not 2.5"),
    ("completions", {"prompt": "x", "frequency_penalty": "x"}, "frequency_penalty", "expected `float"),
    ("completions", {"prompt": "x", "presence_penalty": -3}, "presence_penalty", "must be from -2 to 2, not -3"),
    ("completions", {"prompt": "x", "presence_penalty": float("nan")}, "presence_penalty", "a finite number"),
    ("completions", {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "must be above 0, not 0"),
    ("completions", {"prompt": "x", "repetition_penalty": [1]}, "repetition_penalty", "expected `float"),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", 'the key "a"'),
    ("completions", {"prompt": "x", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", f"token id {VOCAB_SIZE}"),
    ("completions", {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias", "token id -1, outside"),
    ("completions", {"prompt": "x", "logit_bias": {"1": "x"}}, "logit_bias", "expected `float"),
    ("completions", {"prompt": "x", "logit_bias": {"1": float("nan")}}, "logit_bias", "must be a finite number"),
    ("completions", {"prompt": "x", "logit_bias": [1]}, "logit_bias", "expected `object"),
    ("completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one token"),
    ("completions", {"prompt": "x", "allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids", "[1] is"),
    ("completions", {"prompt": "x", "allowed_token_ids": ["1"]}, "allowed_token_ids", "expected `int"),
    ("completions", {"prompt": "x", "bad_words": [""]}, "bad_words", "1 to 256 characters"),
    ("completions", {"prompt": "x", "bad_words": "x"}, "bad_words", "expected `array"),
    ("completions", {"prompt": "x", "bad_words": ["x"] * 129}, "bad_words", "at most 128 texts, not 129"),
    ("completions", {"prompt": "x", "spaces_between_special_tokens": 1}, "spaces_between_special_tokens", "`bool"),
    ("completions", {"prompt": "x", "skip_special_tokens": "no"}, "skip_special_tokens", "expected `bool"),
    ("completions", {"prompt": "x", "include_stop_str_in_output": 0}, "include_stop_str_in_output", "`bool"),
    ("completions", {"prompt": "x", "seed": 2**70}, "seed", "seed"),
    ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16 strings"),
    ("completions", {"prompt": "x", "stop": ""}, "stop", "1 to 256 characters"),
    ("completions", {"prompt": "x", "stop": [1]}, "stop", "stop[0]: expected `str`"),
    ("completions", {"prompt": "x", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "outside the vocabulary"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ("completions", {"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a known"),
    ("completions", {"prompt": "x", "cache_salt": "s" * 257}, "cache_salt", "at most 256"),
    ("completions", {"prompt": "x", "priority": 2**31}, "priority", "from -2147483648 to 2147483647, not 2147483648"),
    ("completions", {"prompt": "x", "priority": 0.5}, "priority", "expected `int"),
    ("completions", {"prompt": ["a"] * 129}, "prompt", "1 to 128 are allowed"),
    ("completions", {"prompt": "\ud800"}, None, ""),
    ("chat/completions", {"messages": []}, "messages", "messages is empty"),
    ("chat/completions", {}, "messages", "messages is missing"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages", "role"),
    ("chat/completions", {"messages": "hi"}, "messages", "messages: expected `array`"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "messages has"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": 3}, "logprobs", "`bool"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3},
        "top_logprobs",
        "top_logprobs needs logprobs to be true",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs must be from 0 to 20, not 21",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools[0].function", "tools"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1000},
        "max_completion_tokens",
        "max_completion_tokens is 1000",
    ),
]


@pytest.fixture
async def quick(cluster):
    return await cluster.start(prefill=0, decode=1)


async def test_http_refusals(quick):
    for path, body, field, message in HTTP_REFUSALS:
        data = json.dumps(body)
        response = await quick.http.post(f"/v1/{path}", content=data)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in ("invalid_request", "prompt_too_long")
        assert message in error["message"], (body, error)
        if field is not None:
            assert error["param"] == field, (body, error)
        assert len(error["message"]) < 500
    # of several prompts a good one may have begun before a bad one was seen
    assert all(list(call.request.request.prompt_token_ids) == tokens("a") for call in quick.of("decode").calls)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "x"} x'])
async def test_bodies_that_are_no_request(quick, data):
    response = await quick.http.post("/v1/completions", content=data)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


async def test_a_body_beyond_the_limit(quick):
    response = await quick.http.post("/v1/completions", content=b" " * (17 << 20))
    assert response.status_code == 400
    assert "more than" in response.json()["error"]["message"]


async def test_paths_methods_and_models_that_are_not_there(quick):
    http = quick.http
    assert (await http.get("/v1/nothing")).status_code == 404
    assert (await http.get("/v1/completions")).status_code == 405
    assert (await http.get("/v1/models/other")).status_code == 404
    response = await http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert "'fake-model'" in response.json()["error"]["message"]
    models = (await http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("fake-model", MAX_MODEL_LEN)]
    assert (await http.get("/v1/models/fake-model")).json()["id"] == "fake-model"


async def test_every_accepted_field_reaches_the_worker(quick):
    response = await quick.complete(
        prompt="hey",
        max_tokens=7,
        model="fake-model",
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        min_tokens=2,
        seed=-7,
        stop="zz",
        stop_token_ids=[3],
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        cache_salt="tenant",
        user="someone",
        n=1,
        best_of=1,
        echo=False,
        logit_bias={"3": 5, "4": -1000},
        presence_penalty=-1,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        allowed_token_ids=[2, 3, 4],
        bad_words=["ab"],
        spaces_between_special_tokens=False,
    )
    assert response.status_code == 200, response.text
    request = quick.of("decode").calls[0].request.request
    sampling = request.sampling
    assert list(request.prompt_token_ids) == tokens("hey")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-7, 7, 2)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["zz"], [3])
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert not sampling.spaces_between_special_tokens
    assert dict(sampling.logit_bias) == {3: 5.0, 4: -100.0}
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    assert penalties == (-1, 0.5, 1.25)
    assert (list(sampling.allowed_token_ids), list(sampling.bad_words)) == ([2, 3, 4], [])
    assert tokens("ab") in [list(sequence.token_ids) for sequence in sampling.bad_words_token_ids]
    await quick.complete(prompt="hey", max_tokens=7)
    assert quick.of("decode").calls[1].request.request.hash_root != request.hash_root


async def test_nulls_are_absent_fields(quick):
    fields = dict.fromkeys(("temperature", "top_p", "seed", "stop", "n", "stream", "logprobs", "user", "top_k"))
    assert await quick.text(**fields) == said(5)


async def test_default_lengths(quick):
    assert (await quick.http.post("/v1/completions", json={"prompt": "hi"})).json()["usage"]["completion_tokens"] == 16
    # less is left than the default
    response = await quick.http.post("/v1/completions", json={"prompt": "x" * 250})
    assert response.json()["usage"]["completion_tokens"] == 6
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    response = await quick.http.post("/v1/chat/completions", json={"messages": messages})
    usage = response.json()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN
    assert usage["prompt_tokens"] == 4


async def test_many_prompts_are_many_choices(quick):
    response = await quick.complete(prompt=["one", "three"], max_tokens=3)
    assert [(c["index"], c["text"]) for c in response.json()["choices"]] == [(0, "abc"), (1, "abc")]
    assert response.json()["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    response = await quick.complete(prompt=[[1, 2], [3]], max_tokens=2)
    assert len(response.json()["choices"]) == 2
    assert await quick.text(prompt=[1, 2, 3], max_tokens=2) == "ab"
    ids = {call.request.request.request_id for call in quick.of("decode").calls}
    assert len(ids) == 5


def grpc_request(text="hello", **fields):
    sampling = {
        name: fields.pop(name) for name in list(fields) if name in request_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    }
    request = inference_pb2.GenerateRequest(sampling=request_pb2.SamplingParams(**sampling), **fields)
    if request.WhichOneof("prompt") is None and text is not None:
        request.text.text = text
    return request


GRPC_REFUSALS = [
    (grpc_request(None), "prompt is missing"),
    (grpc_request(""), "text is empty"),
    (grpc_request(tokens=inference_pb2.TokenPrompt()), "tokens is empty"),
    (grpc_request(tokens=inference_pb2.TokenPrompt(token_ids=[1, VOCAB_SIZE])), f"tokens[1] is {VOCAB_SIZE}"),
    (grpc_request(chat=inference_pb2.ChatPrompt()), "chat.messages is empty"),
    (grpc_request("x" * 256), "text has 256 tokens"),
    (grpc_request("x" * 250, max_tokens=7), "sampling.max_tokens is 7 and text has 250 tokens"),
    (grpc_request(temperature=float("nan")), "temperature must be a finite number"),
    (grpc_request(top_p=2), "top_p must be"),
    (grpc_request(max_tokens=0), "max_tokens must be at least 1"),
    (grpc_request(max_tokens=2, min_tokens=3), "min_tokens must be at most max_tokens (2)"),
    (grpc_request(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids[0]"),
    (grpc_request(cache_salt="s" * 257), "cache_salt"),
    (grpc_request(presence_penalty=2.5), "presence_penalty must be from -2 to 2"),
    (grpc_request(frequency_penalty=float("inf")), "frequency_penalty must be a finite number"),
    (grpc_request(repetition_penalty=0), "repetition_penalty must be above 0"),
    (grpc_request(logit_bias={VOCAB_SIZE: 1}), f"logit_bias has token id {VOCAB_SIZE}"),
    (grpc_request(logit_bias={1: float("nan")}), "logit_bias[1] must be from -100 to 100"),
    (grpc_request(allowed_token_ids=[VOCAB_SIZE]), "allowed_token_ids[0]"),
    (grpc_request(logprobs=21), "logprobs must be from 0 to 20, not 21"),
    (grpc_request(bad_words=[""]), "bad_words must be 1 to 256 characters"),
    (grpc_request(bad_words_token_ids=[request_pb2.TokenSequence(token_ids=[1])]), "send sampling.bad_words"),
]


async def test_grpc_refusals(quick):
    for request, message in GRPC_REFUSALS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in quick.grpc.Generate(request)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, request
        assert message in caught.value.details(), (request, caught.value.details())
        assert dict(caught.value.trailing_metadata())[ERROR_CODE_KEY] in ("invalid_request", "prompt_too_long")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in quick.grpc.Generate(grpc_request(model="other"))]
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not quick.of("decode").calls


async def test_a_chat_template_may_speak_in_special_tokens(quick):
    await quick.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    )
    assert list(quick.of("decode").calls[0].request.request.prompt_token_ids) == [EOS + 1, *tokens("hi"), EOS + 2]


@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 2**31 - 1])
async def test_priority_reaches_both_legs_from_both_front_ends(cluster, priority):
    await cluster.start()
    await cluster.text(priority=priority)
    request = inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text="hello"),
        sampling=request_pb2.SamplingParams(max_tokens=3),
        priority=priority,
    )
    assert [response.text for response in [response async for response in cluster.grpc.Generate(request)]]
    for role in ("prefill", "decode"):
        assert [call.request.request.priority for call in cluster.of(role).calls] == [priority] * 2
