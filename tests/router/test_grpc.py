"""The gRPC front end: streams, whole answers, health, reflection, keys, and clients that leave."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.common.errors import Overloaded
from pdserve.common.net.rpc import ERROR_CODE_KEY, RETRY_AFTER_KEY
from pdserve.router.requests import generation
from pdserve.v1 import inference_pb2, request_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.router.fake_worker import (
    ADMITTED,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    decode_outputs,
    first,
    forever,
    outputs,
    play,
    said,
    tokens,
)
from tests.support.run.waiting import HANG_S


def ask(text="hello", max_tokens=5, **fields):
    return inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text=text), sampling=request_pb2.SamplingParams(max_tokens=max_tokens), **fields
    )


async def test_stream(cluster):
    await cluster.start()
    call = cluster.grpc.Generate(ask(stream=True))
    responses = [response async for response in call]
    assert "".join(response.text for response in responses) == said(5)
    assert [token_id for response in responses for token_id in response.token_ids] == tokens(said(5))
    last = responses[-1]
    assert last.finish_reason == request_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (5, 5, 3)
    named = {moment.name: moment.unix_ns for moment in last.moments}
    assert named["arrived"] <= named["tokenized"] <= named["placed"] <= named["first_token"] <= named["finished"]
    assert named["prefill_computed"] == 1
    assert all(not response.moments for response in responses[:-1])
    assert dict(await call.initial_metadata())["x-request-id"] == last.request_id


async def test_whole_answer(cluster):
    await cluster.start()
    [response] = [response async for response in cluster.grpc.Generate(ask())]
    assert response.text == said(5)
    assert response.finish_reason == request_pb2.FINISH_REASON_LENGTH
    assert response.usage.completion_tokens == 5


async def test_chat_and_tokens(cluster):
    await cluster.start()
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    sampling = request_pb2.SamplingParams(max_tokens=3)
    for request in (
        inference_pb2.GenerateRequest(chat=chat, sampling=sampling),
        inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[1, 2]), sampling=sampling),
    ):
        [response] = [response async for response in cluster.grpc.Generate(request)]
        assert response.text == said(3)


async def test_get_model(cluster):
    await cluster.start()
    model = await cluster.grpc.GetModel(inference_pb2.GetModelRequest())
    assert (model.model, model.max_model_len, model.vocab_size) == ("fake-model", MAX_MODEL_LEN, VOCAB_SIZE)
    assert model.model_fingerprint == "m" * 32


async def test_health_follows_the_fleet_and_reflection_names_the_service(cluster):
    await cluster.start()
    health = health_pb2_grpc.HealthStub(cluster.channel)

    async def until(status):
        async with asyncio.timeout(HANG_S):
            watching = health.Watch(health_pb2.HealthCheckRequest())
            while (await watching.read()).status != status:
                pass
            watching.cancel()

    await until(health_pb2.HealthCheckResponse.SERVING)
    await cluster.of("decode").kill()
    await until(health_pb2.HealthCheckResponse.NOT_SERVING)
    states = [(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("live", "ready")]
    assert states == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [service.name async for response in call for service in response.list_services_response.service]
    assert "pdserve.v1.InferenceService" in names


async def test_api_keys_on_both_front_ends(cluster):
    await cluster.start(api_keys=("first-key", "second-key"))
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"authorization": "Bearer second-key"}, 200),
    ):
        for method, path, body in (
            ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}),
            ("GET", "/v1/models", None),
        ):
            response = await cluster.http.request(method, path, json=body, headers=headers)
            assert response.status_code == status
        call = cluster.grpc.Generate(ask(), metadata=tuple(headers.items()))
        if status == 200:
            assert [response.text async for response in call] == [said(5)]
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="API key"):
                await call.read()
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await cluster.http.get("/health")).status_code == 200


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("when", ["before the first token", "in mid-stream"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_both_calls(cluster, when, stream):
    await cluster.start()
    early = when == "before the first token"
    cluster.of("prefill").script = play(forever) if early else play(first(), forever)
    cluster.of("decode").script = play(ADMITTED, forever)
    call = cluster.grpc.Generate(ask(stream=stream))
    if stream and not early:
        assert (await call.read()).text == "a"
    for role in ("prefill", "decode"):
        await cluster.of(role).called()
    call.cancel()
    for role in ("prefill", "decode"):
        async with asyncio.timeout(HANG_S):
            await cluster.of(role).calls[0].cancelled.wait()
    await cluster.idle()


async def test_i6_a_client_that_reads_again_too_late_is_told_why_there_is_no_more(cluster, monkeypatch):
    monkeypatch.setattr(generation, "UNREAD_S", 0.3)
    await cluster.worker("decode", max_model_len=1 << 20).start()
    await cluster.start(prefill=0, decode=0, max_unread_bytes=1 << 30)
    # more than travels unread to a client that takes 64 KiB at a time
    many = [decode_outputs(1 + 20_000 * i, token_ids=[0] * 20_000) for i in range(40)]
    has_read = asyncio.Event()
    # on a busy machine the client would otherwise be too late with its first message
    cluster.of("decode").script = play(ADMITTED, decode_outputs(0, "a"), lambda *_: has_read.wait(), *many, forever)
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(cluster.addresses[1], narrow) as channel:
        call = InferenceServiceStub(channel).Generate(ask(stream=True, max_tokens=800_001))
        await call.read()
        has_read.set()
        async with asyncio.timeout(HANG_S):
            await cluster.of("decode").calls[0].cancelled.wait()
            await cluster.idle()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _to_the_end(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert dict(caught.value.trailing_metadata())[ERROR_CODE_KEY] == "cancelled"
    assert "the client read nothing for" in str(caught.value.details())


async def _to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_clients_deadline_is_the_requests(cluster):
    await cluster.start()
    cluster.of("prefill").script = play(forever)
    cluster.of("decode").script = play(forever)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in cluster.grpc.Generate(ask(), timeout=1.0)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for role in ("prefill", "decode"):
        async with asyncio.timeout(HANG_S):
            await cluster.of(role).calls[0].cancelled.wait()
        assert cluster.of(role).calls[0].request.timeout_s < 1.1


async def test_overload_is_told_at_once(cluster):
    await cluster.start(max_running_requests=1, max_queued_requests=1)
    for worker in cluster.workers:
        worker.script = play(forever)
    asking = [asyncio.create_task(cluster.complete()) for _ in range(2)]
    await cluster.of("decode").called()
    await cluster.queued(1)
    response = await cluster.complete()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [r async for r in cluster.grpc.Generate(ask())]
    assert caught.value.code() is Overloaded.grpc_status
    metadata = dict(caught.value.trailing_metadata())
    assert metadata[ERROR_CODE_KEY] == "overloaded"
    assert float(metadata[RETRY_AFTER_KEY]) == 1
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await cluster.idle()


async def test_trace_context_is_passed_on_or_made(cluster):
    await cluster.start()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    _ = [r async for r in cluster.grpc.Generate(ask(), metadata=(("traceparent", parent), ("tracestate", "a=1")))]
    await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": parent})
    await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": "garbage"})
    for role in ("prefill", "decode"):
        headers = [dict(call.request.trace_headers) for call in cluster.of(role).calls]
        assert headers[0] == {"traceparent": parent, "tracestate": "a=1"}
        assert headers[1] == {"traceparent": parent}
        assert len(headers[2]["traceparent"]) == 55
        assert headers[2]["traceparent"] != parent


async def test_stop_reason_is_told(cluster):
    await cluster.start(prefill=0)

    def stopped(worker, call):
        event = outputs(0, "ab", "stop")
        event.stop_token_id = tokens("b")[0]
        from pdserve.v1 import decode_pb2

        return decode_pb2.DecodeEvent(outputs=event)

    cluster.of("decode").script = play(ADMITTED, stopped)
    [response] = [response async for response in cluster.grpc.Generate(ask())]
    assert response.finish_reason == request_pb2.FINISH_REASON_STOP
    assert response.stop_reason == str(tokens("b")[0])


KINDS = request_pb2.OutputKind


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_end(cluster, stream):
    await cluster.start()
    request = ask(stream=stream)
    request.sampling.output_kind = KINDS.OUTPUT_KIND_FINAL_ONLY
    [response] = [response async for response in cluster.grpc.Generate(request)]
    assert response.text == said(5)
    assert response.usage.completion_tokens == 5


async def test_everything_so_far_in_each_message(cluster):
    await cluster.start(prefill=0)
    go_on = asyncio.Semaphore(0)

    async def wait(worker, call):
        await go_on.acquire()

    steps = [decode_outputs(place, char, "length" if place == 3 else None) for place, char in enumerate(said(4))]
    cluster.of("decode").script = play(*(part for step in steps for part in (step, wait)))
    request = ask(max_tokens=4, stream=True)
    request.sampling.output_kind = KINDS.OUTPUT_KIND_CUMULATIVE
    texts = []
    async for response in cluster.grpc.Generate(request):
        texts.append(response.text)
        assert list(response.token_ids) == tokens(response.text)
        go_on.release()
    assert texts == [said(count) for count in range(1, 5)]
    assert response.finish_reason == request_pb2.FINISH_REASON_LENGTH
    # one message of everything, where one is asked for
    cluster.of("decode").script = play(*steps)
    request.stream = False
    assert [response.text async for response in cluster.grpc.Generate(request)] == [said(4)]


async def test_deltas_by_name(cluster):
    await cluster.start()
    request = ask(stream=True)
    request.sampling.output_kind = KINDS.OUTPUT_KIND_DELTA
    assert "".join([response.text async for response in cluster.grpc.Generate(request)]) == said(5)


async def test_token_ids_without_text(cluster):
    await cluster.start()
    request = ask(stream=True)
    request.sampling.detokenize = False
    responses = [response async for response in cluster.grpc.Generate(request)]
    assert [token_id for response in responses for token_id in response.token_ids] == tokens(said(5))
    assert {response.text for response in responses} == {""}


async def test_plug_ins_reach_both_workers(cluster):
    await cluster.start()
    request = ask()
    request.sampling.logits_processors.add(name="ban", args='{"tokens": [1]}')
    _ = [response async for response in cluster.grpc.Generate(request)]
    body = {"prompt": "hello", "max_tokens": 5, "logits_processors": [{"name": "ban", "args": {"tokens": [1]}}]}
    assert (await cluster.http.post("/v1/completions", json=body)).status_code == 200
    for worker in cluster.workers:
        for call in worker.calls:
            [asked] = call.request.sampling_params.logits_processors
            assert (asked.name, asked.args) == ("ban", {"tokens": [1]})
        assert len(worker.calls) == 2
