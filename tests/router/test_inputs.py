"""Inputs of clients, over both front ends: each refusal names the field, its value and its limit."""

from __future__ import annotations

import grpc
import pytest

from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import EOS, MAX_MODEL_LEN, said, tokens


@pytest.fixture
async def quick(cluster):
    return await cluster.start(prefill=0, decode=1)


async def test_paths_methods_and_models_that_are_not_there(quick):
    http = quick.http
    assert (await http.get("/v1/nothing")).status_code == 404
    assert (await http.get("/v1/completions")).status_code == 405
    assert (await http.get("/v1/models/other")).status_code == 404
    response = await http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
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
    request = quick.of("decode").calls[0].request
    sampling = request.sampling_params
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
    assert (list(sampling.allowed_token_ids), list(sampling.bad_words)) == ([2, 3, 4], ["ab"])
    assert tokens("ab") in [list(sequence) for sequence in sampling.bad_words_token_ids]
    await quick.complete(prompt="hey", max_tokens=7)
    assert quick.of("decode").calls[1].request.hash_root != request.hash_root


@pytest.mark.few(2)
@pytest.mark.parametrize("stop", ["", [""], []])
async def test_an_empty_stop_is_none(quick, stop):
    await quick.complete(prompt="hey", max_tokens=7, stop=stop)
    assert not quick.of("decode").calls[0].request.sampling_params.stop


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
    ids = {call.request.request_id for call in quick.of("decode").calls}
    assert len(ids) == 5


async def test_a_chat_template_may_speak_in_special_tokens(quick):
    await quick.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    )
    assert list(quick.of("decode").calls[0].request.prompt_token_ids) == [EOS + 1, *tokens("hi"), EOS + 2]


@pytest.mark.few(3)
@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 2**31 - 1])
async def test_priority_reaches_both_calls_from_both_front_ends(cluster, priority):
    await cluster.start(scheduling_policy="priority")
    await cluster.text(priority=priority)
    request = inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text="hello"),
        sampling=request_pb2.SamplingParams(max_tokens=3),
        priority=priority,
    )
    assert [response.text for response in [response async for response in cluster.grpc.Generate(request)]]
    for role in ("prefill", "decode"):
        assert [call.request.priority for call in cluster.of(role).calls] == [priority] * 2


async def test_a_priority_without_the_policy_is_refused_by_both_front_ends(cluster):
    await cluster.start()
    told = "priority is -1, and requests run in order of arrival here (scheduling_policy is fcfs)"
    for path, prompt in (("completions", {"prompt": "x"}), ("responses", {"input": "x"})):
        response = await cluster.http.post(f"/v1/{path}", json={**prompt, "priority": -1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
        assert told in response.json()["error"]["message"]
        assert (await cluster.http.post(f"/v1/{path}", json={**prompt, "priority": 0})).status_code == 200
    request = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="x"), priority=-1)
    for call in (cluster.grpc.Generate(request), cluster.grpc.Session(iter([request]))):
        with pytest.raises(grpc.aio.AioRpcError, match="priority is -1, and requests run") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await cluster.idle()


@pytest.mark.parametrize("asked", [None, 0, 3, 32])
async def test_speculative_tokens_reach_workers_that_may_ignore_them(cluster, asked):
    await cluster.start()
    await cluster.text(**({} if asked is None else {"speculative_tokens": asked}))
    request = inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text="hello"),
        sampling=request_pb2.SamplingParams(max_tokens=3),
        speculative_tokens=asked,
    )
    assert [response.text for response in [response async for response in cluster.grpc.Generate(request)]]
    for role in ("prefill", "decode"):
        carried = [call.request for call in cluster.of(role).calls]
        assert [request.speculative_tokens for request in carried] == [asked] * 2
        assert all(request.ignorable == (() if asked is None else ("speculative_tokens",)) for request in carried)
