"""Embeddings through the router: what clients send and get, what a prefill worker is asked, and what may go wrong."""

from __future__ import annotations

import asyncio
import base64
import struct

import grpc
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from pdserve.common.errors import Draining, InternalError, InvalidRequest, Overloaded
from pdserve.common.net.rpc import ERROR_CODE_KEY
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.requests.tasks import embedding_task as embedding_module
from pdserve.v1 import inference_pb2, prefill_pb2, request_pb2
from tests.router.fake_worker import HIDDEN_SIZE, MAX_MODEL_LEN, embed_well, embedding, forever, play, tokens
from tests.support.processes.otlp_receiver import otlp_receiver
from tests.support.run.waiting import HANG_S


@pytest.fixture
async def prefill(cluster):
    """The prefill worker of a fleet of one."""
    await cluster.start(prefill=1, decode=0)
    return cluster.of("prefill")


async def embed(cluster, **body):
    return await cluster.http.post("/v1/embeddings", json={"input": "hello", **body})


async def vectors(cluster, **body):
    response = await embed(cluster, **body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


def grpc_request(*texts, **fields):
    inputs = [inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text=text)) for text in texts]
    return inference_pb2.EmbedRequest(inputs=inputs, **fields)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hello", [tokens("hello")]),
        (["b", "a", "cc"], [tokens("b"), tokens("a"), tokens("cc")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_every_kind_of_input(cluster, prefill, given, prompts):
    response = await embed(cluster, input=given, model="fake-model", user="someone")
    answer = response.json()
    assert (answer["object"], answer["id"]) == ("list", f"embd-{response.headers['x-request-id']}")
    assert answer["created"] > 1_600_000_000, "seconds since 1970"
    assert answer["model"] == "fake-model"
    assert [entry["embedding"] for entry in answer["data"]] == [embedding(prompt) for prompt in prompts]
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    total = sum(map(len, prompts))
    details = {"cached_tokens": sum(min(2, len(prompt)) for prompt in prompts)}
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": details}
    assert response.headers["x-request-id"] in prefill.calls[0].request.request_id
    # however they came in
    assert sorted(list(call.request.prompt_token_ids) for call in prefill.calls) == sorted(prompts)


async def test_what_is_asked_of_the_worker(cluster, prefill):
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    body = {"input": "hey", "pooling_type": "mean", "normalize": False, "dimensions": 3, "cache_salt": "tenant"}
    response = await cluster.http.post("/v1/embeddings", json=body, headers={"traceparent": trace})
    assert len(response.json()["data"][0]["embedding"]) == 3
    await embed(cluster, input="hey")
    salted, plain = (call.request for call in prefill.calls)
    assert salted.pooling_params == PoolingParams(pooling_type="mean", normalize=False, dimensions=3)
    assert plain.pooling_params == PoolingParams(pooling_type="last", normalize=True)
    assert salted.hash_root != plain.hash_root
    assert salted.trace_headers["traceparent"].split("-")[1] == "ab" * 16
    assert 0 < salted.timeout_s <= 600
    assert prefill.calls[1].sent.attempt == 0


async def test_base64_is_float32(cluster, prefill):
    plain = await vectors(cluster, input=["a", "b"], encoding_format="float")
    encoded = await vectors(cluster, input=["a", "b"], encoding_format="base64")
    assert [list(struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(text))) for text in encoded] == plain


async def test_the_openai_client_asks_for_base64_by_itself(cluster, prefill):
    base_url = f"http://{cluster.addresses[0]}/v1"
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        answer = await client.embeddings.create(model="fake-model", input=["a", "bc"], dimensions=4)
        listed = await client.embeddings.create(model="fake-model", input=[tokens("a")], encoding_format="float")
    assert [entry.embedding for entry in answer.data] == [embedding(tokens(t), 4) for t in ("a", "bc")]
    assert listed.data[0].embedding == embedding(tokens("a"))
    assert answer.usage.total_tokens == 3


async def test_over_grpc(cluster, prefill):
    request = grpc_request("hey", pooling=request_pb2.PoolingParams(dimensions=2))
    request.inputs.add().tokens.token_ids.extend([5, 6])
    call = cluster.grpc.Embed(request)
    answer = await call
    expected = [embedding(prompt, 2) for prompt in (tokens("hey"), [5, 6])]
    assert [list(entry.values) for entry in answer.embeddings] == expected
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_tokens) == (5, 0, 4)
    assert dict(await call.initial_metadata())["x-request-id"] == answer.request_id
    assert {"arrived", "tokenized", "prefill_computed", "finished"} <= {moment.name for moment in answer.moments}
    assert (await cluster.grpc.GetModel(inference_pb2.GetModelRequest())).hidden_size == HIDDEN_SIZE


async def test_a_prompt_may_have_the_models_whole_length(cluster, prefill):
    await vectors(cluster, input="x" * MAX_MODEL_LEN)
    response = await embed(cluster, input=["x", "x" * (MAX_MODEL_LEN + 1)])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "input[1]")
    assert "257 tokens; the model's length is 256" in error["message"]


async def test_more_dimensions_than_the_model_has(cluster, prefill):
    response = await embed(cluster, dimensions=HIDDEN_SIZE + 1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "dimensions"
    assert "from 1 to 8, the model's hidden size, not 9" in response.json()["error"]["message"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.grpc.Embed(grpc_request("x", pooling=request_pb2.PoolingParams(dimensions=9)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not prefill.calls


async def test_an_answer_that_fits_into_no_message_is_refused_before_it_is_computed(cluster, prefill):
    request = grpc_request(*["x"] * 2048, pooling=request_pb2.PoolingParams(dimensions=4096))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.grpc.Embed(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs has 2048 entries" in str(refused.value.details())
    assert not prefill.calls


async def test_a_fleet_without_prefill_workers_says_so_at_once(cluster):
    await cluster.start(prefill=0, decode=1)
    async with asyncio.timeout(HANG_S):
        response = await embed(cluster)
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "worker_lost"
    assert (
        "embeddings are computed by prefill workers, and none could serve this: no prefill address" in error["message"]
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.grpc.Embed(grpc_request("x"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_that_computes_none_is_not_asked(cluster):
    old, new = cluster.worker("prefill"), cluster.worker("prefill")
    old.hidden_size = 0
    await old.start()
    await new.start()
    await cluster.start(prefill=0, decode=1)
    for _ in range(4):
        await vectors(cluster)
    assert (len(old.calls), len(new.calls)) == (0, 4)


@pytest.mark.parametrize("error", [Draining("leaves"), Overloaded("full")])
async def test_another_worker_when_one_refuses(cluster, error):
    await cluster.start(prefill=2, decode=0)
    first, second = cluster.workers
    first.scripts = second.scripts = [play(error)]
    assert await vectors(cluster) == [embedding(tokens("hello"))]
    assert sorted(call.sent.attempt for worker in cluster.workers for call in worker.calls) == [0, 1]
    assert len(first.calls) == len(second.calls) == 1


async def test_what_a_worker_refuses_and_the_router_took_is_that_workers_fault(cluster, prefill, caplog):
    prefill.scripts = [play(InvalidRequest("no", "dimensions"))]
    assert await vectors(cluster) == [embedding(tokens("hello"))]
    assert len(prefill.calls) == 2
    prefill.scripts = [play(InvalidRequest("no", "dimensions"))] * 9
    response = await embed(cluster)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "peer_error")
    assert "with invalid_request: no" in caplog.text


async def test_a_vector_of_another_length_is_not_given_out(cluster, prefill, caplog):
    prefill.scripts = [play(prefill_pb2.PoolingResult(values=[1.0]))]
    assert await vectors(cluster) == [embedding(tokens("hello"))]
    assert "sent 1 numbers, 8 were requested" in caplog.text


async def test_a_worker_that_dies_is_replaced_and_two_are_enough(cluster):
    await cluster.start(prefill=2, decode=0, policy="round_robin")
    first, second = cluster.workers

    async def die(worker, call):
        await worker.kill()

    first.scripts = [play(die, forever)]
    assert await vectors(cluster) == [embedding(tokens("hello"))]
    await first.start()
    await cluster.live(prefill=2)
    first.scripts, second.scripts = [play(die, forever)], [play(die, forever)]
    response = await embed(cluster, input="poison")
    assert response.status_code == 503
    assert "2 workers died while they served this request" in response.json()["error"]["message"]
    await first.start()
    await cluster.live(prefill=1)
    response = await embed(cluster, input="poison")
    assert "it is refused for another" in response.json()["error"]["message"]
    assert await vectors(cluster) == [embedding(tokens("hello"))]


async def test_one_input_that_fails_ends_the_others(cluster, prefill):
    begun = asyncio.Event()

    async def begin(worker, call):
        begun.set()
        await forever(worker, call)

    async def fail(worker, call):
        await begun.wait()
        raise InternalError("not this one")

    prefill.scripts = [play(begin), play(fail)]
    response = await embed(cluster, input=["a", "b"])
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    async with asyncio.timeout(HANG_S):
        for call in prefill.calls:
            await call.ended.wait()


async def test_a_client_that_leaves_ends_the_call(cluster, prefill):
    prefill.script = prefill.scripts = [play(forever), play(forever)]
    asked = asyncio.create_task(embed(cluster))
    await prefill.called()
    asked.cancel()
    await prefill.calls[0].cancelled.wait()
    call = cluster.grpc.Embed(grpc_request("x"))
    await prefill.called(2)
    call.cancel()
    await prefill.calls[1].cancelled.wait()
    await cluster.idle()


async def test_a_deadline_ends_it(cluster, prefill):
    prefill.scripts = [play(forever)]
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await cluster.grpc.Embed(grpc_request("x"), timeout=1.0)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await prefill.calls[0].cancelled.wait()
    assert prefill.calls[0].request.timeout_s < 1.1


async def test_keys_and_admission_hold_as_for_generations(cluster):
    await cluster.start(
        prefill=1, decode=0, api_keys=("k1",), max_running_requests=1, max_queued_requests=1, max_requests_per_key=8
    )
    worker = cluster.of("prefill")
    assert (await embed(cluster)).status_code == 401
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.grpc.Embed(grpc_request("x"))
    assert dict(refused.value.trailing_metadata())[ERROR_CODE_KEY] == "unauthenticated"
    cluster.http.headers["authorization"] = "Bearer k1"
    gate = asyncio.Event()

    async def held(worker, call):
        await gate.wait()
        async for answer in embed_well(worker, call):
            yield answer

    worker.scripts = [held]
    asking = [asyncio.create_task(vectors(cluster, input="a"))]
    await worker.called()
    # as many as one request may hold, while nobody else waits
    asking.append(asyncio.create_task(vectors(cluster, input=["a", "b", "c"])))
    await cluster.queued(3)
    response = await embed(cluster, input=["a", "b", "c"])
    assert response.status_code == 429
    assert "max_queued_requests" in response.json()["error"]["message"]
    assert response.headers["retry-after"]
    response = await embed(cluster, input=["a"] * 9)
    assert response.status_code == 400
    assert "max_requests_per_key is 8" in response.json()["error"]["message"]
    assert len(worker.calls) == 1
    gate.set()
    assert list(map(len, await asyncio.gather(*asking))) == [1, 3]


async def test_a_router_that_leaves_tells_who_is_still_there(cluster):
    await cluster.start(prefill=1, decode=0, drain_s=0.01)
    worker = cluster.of("prefill")
    worker.scripts = [play(forever)]
    asked = asyncio.create_task(embed(cluster))
    await worker.called()
    cluster.stop.set()
    response = await asked
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    await worker.calls[0].cancelled.wait()


async def test_metrics_and_the_placement_log(cluster, prefill):
    await vectors(cluster, input=["aaaa", "b"])
    await embed(cluster, dimensions=0)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families((await cluster.http.get("/metrics")).text)
        for sample in family.samples
    }
    assert samples["pdserve_requests_total", "stop"] == 2
    assert samples["pdserve_requests_total", "invalid_request"] == 1
    assert samples["pdserve_prompt_tokens_total",] == 5
    assert samples["pdserve_cached_prompt_tokens_total", "pool"] == 2 + 1, "the second prompt has one token"
    assert samples["pdserve_output_tokens_total",] == 0
    assert samples["pdserve_request_seconds_count",] == 2
    assert samples["pdserve_time_to_first_token_seconds_count",] == 0
    assert samples["pdserve_attempts_total", "ok"] == 2
    placements = (await cluster.http.get("/debug/routing")).json()["placements"]
    assert [(placed["kind"], placed["prefill"]) for placed in placements] == [("prefill-only", "prefill0")] * 2


async def test_a_mean_is_not_placed_by_what_is_cached(cluster):
    await cluster.start(prefill=2, decode=0)
    prompt = "x" * 64
    await vectors(cluster, input=prompt)
    [holder] = [worker for worker in cluster.workers if worker.calls]
    await vectors(cluster, input=prompt)
    assert len(holder.calls) == 2
    overlaps = []
    for pooling_type in ("last", "mean"):
        await vectors(cluster, input=prompt, pooling_type=pooling_type)
        placed = (await cluster.http.get("/debug/routing")).json()["placements"][0]
        overlaps.append(max(candidate["overlap_blocks"] for candidate in placed["candidates"]))
    assert overlaps == [4, 0]


async def test_decode_workers_are_no_candidates(cluster):
    await cluster.start(prefill=2, decode=2)
    await vectors(cluster, input="x" * 64)
    [placed] = (await cluster.http.get("/debug/routing")).json()["placements"]
    assert {candidate["role"] for candidate in placed["candidates"]} == {"prefill"}
    assert not placed["left_out"]


async def test_one_trace(cluster):
    with otlp_receiver() as collector:
        await cluster.start(prefill=1, decode=0)
        cluster.of("prefill").scripts = [play(Overloaded("full"))]
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        response = await cluster.http.post("/v1/embeddings", json={"input": "hello"}, headers=headers)
        assert response.status_code == 200

        def complete(found):
            # the request's own span ends last; on a busy machine there is one of admission too
            return any(span.part == "request" for span in found) and len(found) >= 6

        spans = await asyncio.to_thread(collector.wait_for, complete, "ab" * 16)
    names = sorted(span.part for span in spans if span.part != "admission")
    assert names == ["attempt", "attempt", "request", "route", "route", "tokenize"]
    (request,) = (span for span in spans if span.part == "request")
    assert request.attributes["gen_ai.operation.name"] == "embeddings"
    assert request.attributes["gen_ai.usage.input_tokens"] == 5
    assert request.parent_id == "cd" * 8
    assert not request.failed
    attempts = [span for span in spans if span.part == "attempt"]
    assert sorted(span.failed for span in attempts) == [False, True]
    # the worker hangs its spans under the attempt's
    sent = [call.request.trace_headers["traceparent"] for call in cluster.of("prefill").calls]
    assert {header.split("-")[2] for header in sent} == {span.span_id for span in attempts}


async def test_inputs_beyond_those_that_run_come_after_them_and_have_no_more_time(cluster, monkeypatch):
    monkeypatch.setattr(embedding_module, "MAX_RUNNING", 2)
    await cluster.start(prefill=1, decode=0, request_timeout_s=20.0)
    worker = cluster.of("prefill")
    running, most, left_s = 0, 0, []

    async def count(worker, call):
        nonlocal running, most
        running += 1
        most = max(most, running)
        left_s.append(call.request.timeout_s)
        await asyncio.sleep(0.1)
        running -= 1
        async for event in embed_well(worker, call):
            yield event

    worker.scripts = [count] * 7
    response = await cluster.http.post("/v1/embeddings", json={"input": ["x" * (n + 1) for n in range(7)]})
    assert response.status_code == 200, response.text
    assert [entry["index"] for entry in response.json()["data"]] == list(range(7))
    assert [entry["embedding"][0] for entry in response.json()["data"]] == [
        embedding(tokens("x" * (n + 1)))[0] for n in range(7)
    ]
    assert most == 2
    # the last pair began after three others
    assert min(left_s) < 20.0 - 0.25
