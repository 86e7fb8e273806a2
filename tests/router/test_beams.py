"""Beam search in the router: its steps, their failures and ends, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import msgspec
import pytest

from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.router.requests.preparation import Preparation
from pdserve.router.tenants.client import CacheGroup
from pdserve.text.beam_search import BeamSearch, BeamSearchParams
from pdserve.v1 import decode_pb2, inference_pb2, request_pb2
from tests.router.fake_worker import (
    ADMITTED,
    EOS,
    PREFILL_ADMITTED,
    Call,
    FakeWorker,
    computed,
    forever,
    outputs,
    play,
    tokens,
)
from tests.support.models.kv_layouts import make_layout

KEY = DeploymentKey(b"0123456789abcdef")
PROMPT = "hello"
WIDTH, MAX_TOKENS = 3, 6
BODY = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "n": WIDTH, "use_beam_search": True, "return_token_ids": True}


def likely(given: Sequence[int], num: int) -> list[tuple[int, float]]:
    """The next tokens by a model that hashes its context."""
    total = sum((place + 1) * token for place, token in enumerate(given))
    ids = itertools.islice(dict.fromkeys((total * 7 + rank * 31) % (EOS + 1) for rank in range(999)), num)
    return [(token_id, -0.2 * rank - (total % 7) * 0.05) for rank, token_id in enumerate(ids)]


def step(call: Call) -> tuple[request_pb2.Outputs, list[int]]:
    """A worker's answer to a beam's step, and the tokens of the beam."""
    prepared = call.request
    beam = list(prepared.output_token_ids)
    found = likely([*prepared.prompt_token_ids, *beam], prepared.sampling_params.logprobs or 0)
    assert prepared.sampling_params.max_tokens == len(beam) + 1
    assert not prepared.eos_token_ids
    logprobs = request_pb2.Logprobs(
        width=len(found) + 1,
        token_ids=[found[0][0], *(token_id for token_id, _ in found)],
        logprobs=[found[0][1], *(logprob for _, logprob in found)],
        sampled_ranks=[1],
    )
    index = prepared.index
    return outputs(len(beam), "", "length", [found[0][0]], cached=3, logprobs=logprobs, index=index), beam


async def one_token(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    yield PREFILL_ADMITTED
    yield computed(call.request, step(call)[0])


async def at_decode(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
    yield ADMITTED
    yield decode_pb2.DecodeEvent(outputs=step(call)[0])


def expected(width: int = WIDTH, **fields: Any) -> list[list[int]]:
    """Beams that `BeamSearch` finds by itself."""
    search = BeamSearch(BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, **fields), [EOS])
    while not search.done:
        search.advance([likely([*tokens(PROMPT), *beam.token_ids], search.num_candidates) for beam in search.live])
    return [list(finished.beam.token_ids) for finished in search.finished]


@pytest.fixture
async def searching(cluster: Any) -> Any:
    await cluster.start()
    cluster.of("prefill").script, cluster.of("decode").script = one_token, at_decode
    return cluster


def beams(response: Any) -> list[list[int]]:
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


async def test_the_beams_of_a_completion(searching: Any) -> None:
    for fields in ({}, {"length_penalty": 2.0, "early_stopping": True}, {"early_stopping": "never"}):
        response = await searching.http.post("/v1/completions", json=BODY | fields)
        assert beams(response) == expected(**fields)
        assert {choice["finish_reason"] for choice in response.json()["choices"]} <= {"stop", "length"}
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["completion_tokens"] == len(searching.of("prefill").calls)
        searching.of("prefill").calls.clear()
    assert not searching.of("decode").calls


async def test_the_likeliest_of_more_beams_and_of_several_prompts(searching: Any) -> None:
    best = await searching.http.post("/v1/completions", json=BODY | {"n": 1, "best_of": 4})
    assert beams(best) == expected(4)[:1]
    both = await searching.http.post("/v1/completions", json=BODY | {"prompt": [PROMPT, PROMPT], "n": 2})
    assert beams(both) == expected(2) * 2


async def test_a_chat_and_grpc(searching: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_completion_tokens": 3, "n": 2, "use_beam_search": True}
    response = await searching.http.post("/v1/chat/completions", json=body)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]
    sampling = request_pb2.SamplingParams(max_tokens=MAX_TOKENS, n=WIDTH)
    prompt = inference_pb2.TextPrompt(text=PROMPT)
    call = inference_pb2.GenerateRequest(
        text=prompt, sampling=sampling, use_beam_search=True, length_penalty=2.0, early_stopping="never"
    )
    answers = [answer async for answer in searching.grpc.Generate(call)]
    assert [list(answer.token_ids) for answer in answers] == expected(length_penalty=2.0, early_stopping="never")
    assert all(answer.cumulative_logprob < 0 for answer in answers)
    assert answers[-1].usage.prompt_tokens == len(PROMPT)


async def test_a_step_survives_its_worker(searching: Any) -> None:
    first = searching.of("prefill")

    async def dies(worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        yield PREFILL_ADMITTED
        await worker.kill()

    # of the third step one of the beams is lost, and decode takes over
    first.scripts = [one_token] * (1 + WIDTH + 1) + [dies]
    response = await searching.http.post("/v1/completions", json=BODY)
    assert beams(response) == expected()
    assert searching.of("decode").calls


async def test_decode_alone(cluster: Any) -> None:
    await cluster.start(prefill=0)
    cluster.of("decode").script = at_decode
    assert beams(await cluster.http.post("/v1/completions", json=BODY)) == expected()


async def test_i6_a_client_that_leaves_ends_all_steps(searching: Any) -> None:
    worker = searching.of("prefill")
    worker.scripts = [one_token, *[play(forever)] * WIDTH]
    asking = asyncio.create_task(searching.http.post("/v1/completions", json=BODY))
    await worker.called(1 + WIDTH)
    asking.cancel()
    for call in worker.calls:
        await call.ended.wait()
    assert len(worker.calls) == 1 + WIDTH


async def test_i6_a_deadline_ends_all_steps(searching: Any) -> None:
    worker = searching.of("prefill")
    worker.scripts = [one_token, *[play(forever)] * WIDTH]
    call = inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text=PROMPT),
        sampling=request_pb2.SamplingParams(max_tokens=MAX_TOKENS, n=WIDTH),
        use_beam_search=True,
    )
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await searching.grpc.Generate(call, timeout=0.5).read()
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for made in worker.calls:
        await made.ended.wait()


async def test_beams_count_as_sequences_of_a_tenant(cluster: Any) -> None:
    await cluster.start(max_requests_per_key=4, api_keys=("k" * 16,))
    headers = {"authorization": f"Bearer {'k' * 16}"}
    refused = await cluster.http.post("/v1/completions", json=BODY | {"n": 5}, headers=headers)
    assert refused.status_code == 400
    assert "5 sequences came in one request; max_requests_per_key is 4" in refused.text
    cluster.of("prefill").script = one_token
    assert beams(await cluster.http.post("/v1/completions", json=BODY, headers=headers)) == expected()


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"stream": True}, "use_beam_search", "so stream must be false"),
    ({"n": 17}, "n", "n must be from 1 to 16, not 17"),
    ({"best_of": 17}, "best_of", "not 17"),
    ({"stop": "x"}, "stop", "stop is not supported with use_beam_search"),
    ({"stop_token_ids": [1]}, "stop_token_ids", "not supported with use_beam_search"),
    ({"presence_penalty": 1}, "presence_penalty", "not supported with use_beam_search"),
    ({"logit_bias": {"1": 1}}, "logit_bias", "not supported with use_beam_search"),
    ({"min_tokens": 1}, "min_tokens", "not supported with use_beam_search"),
    ({"logprobs": 1}, "logprobs", "not supported with use_beam_search"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported with use_beam_search"),
    ({"length_penalty": 33}, "length_penalty", "must be from -32 to 32, not 33"),
    ({"early_stopping": "soon"}, "early_stopping", 'is "soon", true, false or never'),
    ({"beam_width": 4}, "beam_width", "the number of beams is best_of, or n"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "needs use_beam_search to be true"),
    ({"use_beam_search": None, "early_stopping": True}, "early_stopping", "needs use_beam_search to be true"),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("fields", "field", "told"), REFUSALS)
async def test_refusals(searching: Any, fields: dict[str, Any], field: str, told: str) -> None:
    response = await searching.http.post("/v1/completions", json=BODY | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], told in error["message"]) == (400, field, True), error
    assert not searching.of("prefill").calls


async def test_what_has_no_effect_on_beams_and_what_grpc_refuses(searching: Any) -> None:
    sampled = {"temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7}
    assert beams(await searching.http.post("/v1/completions", json=BODY | sampled)) == expected()
    text = inference_pb2.TextPrompt(text="x")
    stream = inference_pb2.GenerateRequest(text=text, use_beam_search=True, stream=True)
    soon = inference_pb2.GenerateRequest(text=text, use_beam_search=True, early_stopping="soon")
    for call, told in ((stream, "stream must be false"), (soon, "early_stopping is .soon., true, false or never")):
        with pytest.raises(grpc.aio.AioRpcError, match=told):
            await searching.grpc.Generate(call).read()
    turns = searching.grpc.Session(iter([inference_pb2.GenerateRequest(text=text, use_beam_search=True)]))
    with pytest.raises(grpc.aio.AioRpcError, match="a session has one sequence"):
        await turns.read()


def test_hashes_of_a_prompt_are_not_computed_again_for_its_beams() -> None:
    preparation = Preparation(None, KEY, 1 << 20)  # type: ignore[arg-type]
    given = list(range(100_002))
    request = GenerationRequest(request_id="r", prompt_token_ids=given, sampling_params=SamplingParams(n=2))
    beam = msgspec.structs.replace(request, n=1, index=1, output_token_ids=[7, 8, 9])
    layout = make_layout(block_size=4)
    prompt = preparation.hashed(request, CacheGroup(), layout)
    took_s, made = [], []
    for known in (None, prompt):
        began_s = time.thread_time()
        made.append(preparation.hashed(beam, CacheGroup(), layout, known))
        took_s.append(time.thread_time() - began_s)
    preparation.close()
    assert made[0] == made[1]
    assert len(made[1].placement_hashes) == len(prompt.placement_hashes) + 1
    assert 2 * took_s[1] < took_s[0]
