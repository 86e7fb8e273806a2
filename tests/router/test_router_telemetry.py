"""A router's spans and metrics of requests that fail, are repeated, refused or left; workers follow a script."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.common.errors import Evicted, InternalError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import ADMITTED, decode_outputs, forever, play
from tests.support.processes.otlp_receiver import otlp_receiver
from tests.support.run.waiting import HANG_S

SAMPLED = 1
"""The flag of a trace context."""


@pytest.fixture
def collector():
    with otlp_receiver() as receiver:
        yield receiver


async def scrape(cluster: Cluster) -> dict[tuple[str, ...], float]:
    """(name, label value, ...) -> value."""
    response = await cluster.http.get("/metrics")
    assert response.status_code == 200
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def spans_of(collector: Any, trace_id: str, count: int) -> list[Any]:
    """All but `admission`, which a request has where the machine made it wait."""

    def expected(spans):
        return [span for span in spans if span.part != "admission"]

    return expected(await asyncio.to_thread(collector.wait_for, lambda spans: len(expected(spans)) >= count, trace_id))


def trace() -> tuple[str, dict[str, str]]:
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{'ab' * 8}-01"}


async def test_a_repeated_attempt_has_a_span_of_its_own(cluster, collector):
    await cluster.start(prefill=0)
    cluster.of("decode").scripts = [play(ADMITTED, Evicted("gone"))]
    cluster.of("decode").step_s = 0.02
    trace_id, headers = trace()
    response = await cluster.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers=headers)
    assert response.status_code == 200
    spans = await spans_of(collector, trace_id, 6)
    first, second = (span for span in spans if span.part == "attempt")
    assert (first.failed, first.attributes["error.type"]) == (True, "evicted")
    assert "gone" in first.cause
    assert (second.failed, second.attributes["pdserve.attempt.number"]) == (False, 1)
    (request,) = (span for span in spans if span.part == "request")
    assert not request.failed
    assert request.parent_id == "ab" * 8
    assert {span.parent_id for span in spans if span is not request} == {request.span_id}
    assert sum(span.part == "route" for span in spans) == 2
    sent = [call.request.trace_headers["traceparent"] for call in cluster.of("decode").calls]
    assert sent == [f"00-{trace_id}-{attempt.span_id}-01" for attempt in (first, second)]
    assert sum(v for name, v in request.attributes.items() if name.startswith("pdserve.phase.")) == pytest.approx(
        request.seconds, rel=0.03
    )
    values = await scrape(cluster)
    assert values["pdserve_attempts_total", "evicted"] == 1
    assert values["pdserve_attempts_total", "ok"] == 1
    assert values["pdserve_requests_total", "length"] == 1
    assert values["pdserve_output_tokens_total",] == 3
    assert values["pdserve_inter_token_latency_seconds_count",] == 2
    assert values["pdserve_placed_calls_total", "decode", "decode0"] == 2
    assert ("pdserve_errors_total", "evicted") not in values


async def test_the_root_names_operation_model_and_parameters(cluster, collector):
    await cluster.start(prefill=0)
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
    }
    asked = {"chat": chat, "text_completion": {"prompt": "x"}}
    for operation, path in (("chat", "chat/completions"), ("text_completion", "completions")):
        trace_id, headers = trace()
        response = await cluster.http.post(f"/v1/{path}", json=asked[operation], headers=headers)
        assert response.status_code == 200
        (root,) = (span for span in await spans_of(collector, trace_id, 4) if span.part == "request")
        assert root.name == f"{operation} fake-model"
        given = {name: root.attributes.get(f"gen_ai.request.{name}") for name in ("max_tokens", "temperature", "top_p")}
        known = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9}
        assert given == (known if operation == "chat" else {"max_tokens": None, "temperature": 1.0, "top_p": 1.0})
        assert root.attributes["gen_ai.operation.name"] == operation
        assert root.attributes["gen_ai.response.model"] == "fake-model"
        assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.seconds


async def test_a_client_that_leaves(cluster, collector):
    await cluster.start(prefill=0)
    cluster.of("decode").script = play(ADMITTED, decode_outputs(0, "a"), forever)
    trace_id, headers = trace()
    body = {"prompt": "x", "max_tokens": 9, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        await anext(response.aiter_text())
        assert (await scrape(cluster))["pdserve_requests_in_flight",] == 1
    spans = {span.part: span for span in await spans_of(collector, trace_id, 4)}
    assert set(spans) == {"tokenize", "route", "attempt", "request"}
    for name in ("attempt", "request"):
        assert spans[name].failed
        assert spans[name].attributes["error.type"] == "cancelled"
    assert spans["request"].attributes["gen_ai.usage.output_tokens"] == 1
    await cluster.idle()
    values = await scrape(cluster)
    assert values["pdserve_requests_total", "cancelled"] == 1
    assert ("pdserve_errors_total", "cancelled") not in values
    assert values["pdserve_requests_in_flight",] == 0


@pytest.mark.slow
async def test_a_deadline_is_named_where_it_cut_an_attempt_short(cluster, collector):
    await cluster.start(prefill=0, request_timeout_s=1.0)
    cluster.of("decode").script = play(ADMITTED, forever)
    trace_id, headers = trace()
    response = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 504
    spans = {span.part: span for span in await spans_of(collector, trace_id, 4)}
    for name in ("attempt", "request"):
        assert spans[name].attributes["error.type"] == "deadline_exceeded"
    values = await scrape(cluster)
    assert values["pdserve_attempts_total", "deadline_exceeded"] == 1


async def test_what_ends_the_others_of_a_request_is_their_cause_too(cluster, collector):
    await cluster.start(prefill=0)
    other_began = asyncio.Event()

    def choose(worker, call):
        if len(call.request.prompt_token_ids) == 1:
            return play(ADMITTED, lambda *_: other_began.set(), forever)(worker, call)
        return play(ADMITTED, lambda *_: other_began.wait(), InternalError("broken"))(worker, call)

    cluster.of("decode").script = choose
    trace_id, headers = trace()
    response = await cluster.http.post("/v1/completions", json={"prompt": ["x", "yy"]}, headers=headers)
    assert response.status_code == 500
    spans = await spans_of(collector, trace_id, 7)
    failed = [span for span in spans if span.part in ("attempt", "request")]
    assert [span.attributes["error.type"] for span in failed] == ["internal_error"] * 3
    values = await scrape(cluster)
    assert values["pdserve_requests_total", "internal_error"] == 2
    assert ("pdserve_requests_total", "cancelled") not in values


async def test_requests_that_are_refused(cluster, collector):
    await cluster.start(prefill=0)
    trace_id, headers = trace()
    too_long = {"prompt": "x" * 5000, "max_tokens": 3}
    response = await cluster.http.post("/v1/completions", json=too_long, headers=headers)
    assert response.status_code == 400
    (span,) = await spans_of(collector, trace_id, 1)
    assert (span.part, span.failed, span.attributes["error.type"]) == ("request", True, "prompt_too_long")
    assert (await cluster.http.post("/v1/completions", content=b"{")).status_code == 400
    assert (await cluster.http.post("/v1/completions", json={"prompt": "x", "model": "other"})).status_code == 404
    values = await scrape(cluster)
    for code in ("prompt_too_long", "invalid_request", "model_not_found"):
        assert values["pdserve_errors_total", code] == 1
        assert values["pdserve_requests_total", code] == 1


async def test_requests_that_are_refused_over_grpc(cluster):
    await cluster.start(prefill=0)
    text = inference_pb2.TextPrompt(text="x")

    async def turns():
        yield inference_pb2.GenerateRequest(model="other", text=text)

    calls = (
        cluster.grpc.Generate(inference_pb2.GenerateRequest(model="other", text=text)),
        cluster.grpc.Session(turns()),
        cluster.grpc.Embed(inference_pb2.EmbedRequest(model="other", inputs=[inference_pb2.EmbedInput(text=text)])),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError):
            await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else anext(aiter(call)))
    values = await scrape(cluster)
    assert values["pdserve_requests_total", "model_not_found"] == values["pdserve_errors_total", "model_not_found"] == 3


async def test_a_leaving_router_ends_its_spans(cluster, collector):
    await cluster.start(prefill=0, drain_s=0.1)
    cluster.of("decode").script = play(ADMITTED, decode_outputs(0, "a"), forever)
    trace_id, headers = trace()
    body = {"prompt": "x", "max_tokens": 9, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        text = response.aiter_text()
        await anext(text)
        cluster.stop.set()
        _ = [part async for part in text]
    spans = {span.part: span for span in await spans_of(collector, trace_id, 4)}
    for name in ("request", "attempt"):
        assert spans[name].attributes["error.type"] == "draining"


async def test_several_prompts_share_one_request(cluster, collector):
    await cluster.start()
    trace_id, headers = trace()
    body = {"prompt": ["x", "yy", "zzz"], "max_tokens": 2}
    assert (await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    spans = await spans_of(collector, trace_id, 10)
    names = sorted(span.part for span in spans)
    assert names == sorted(["request", *["tokenize", "route", "attempt"] * 3])
    (request,) = (span for span in spans if span.part == "request")
    assert request.attributes["gen_ai.usage.input_tokens"] == 6
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3


async def test_a_request_has_the_name_that_its_client_gave_it(cluster, collector):
    await cluster.start()
    text, named = inference_pb2.TextPrompt(text="x"), dict[str, Any](client_request_id="order 7")
    sampling = request_pb2.SamplingParams(max_tokens=2)
    first_turn = inference_pb2.GenerateRequest(text=text, sampling=sampling, **named)
    later_turn = inference_pb2.GenerateRequest(text=text, sampling=sampling)

    async def generate(metadata):
        _ = [response async for response in cluster.grpc.Generate(first_turn, metadata=metadata)]

    async def embed(metadata):
        request = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=text)], **named)
        await cluster.grpc.Embed(request, metadata=metadata)

    async def session(metadata):
        call = cluster.grpc.Session([first_turn, later_turn], metadata=metadata)
        _ = [response async for response in call]

    for ask, num_requests in ((generate, 1), (embed, 1), (session, 2)):
        trace_id, headers = trace()
        await ask(tuple(headers.items()))
        requests = await asyncio.to_thread(
            collector.wait_for, lambda spans, n=num_requests: [s.part for s in spans].count("request") == n, trace_id
        )
        ids = [span.attributes["pdserve.client_request.id"] for span in requests if span.part == "request"]
        assert ids == ["order 7"] * num_requests, ask
    for role, count in (("prefill", 2), ("decode", 2)):
        calls = cluster.of(role).calls
        assert [call.request.client_request_id for call in calls] == ["order 7"] * count


async def test_an_http_request_has_the_name_that_its_client_gave_it_in_a_header(cluster, collector):
    await cluster.start()
    bodies = {
        "/v1/completions": {"prompt": ["x", "y"], "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/v1/embeddings": {"input": "x"},
    }
    name = "order 7, gr\u00fcn"
    for path, body in bodies.items():
        for given in (name, "", None):
            trace_id, traced = trace()
            headers: dict[str, Any] = dict(traced)
            if given is not None:
                headers["x-request-id"] = given.encode("latin-1")
            response = await cluster.http.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
            # what this service calls it is its own
            assert len(response.headers["x-request-id"]) == 32
            assert name not in response.text
            spans = await asyncio.to_thread(
                collector.wait_for, lambda spans: "request" in [span.part for span in spans], trace_id
            )
            (request,) = (span for span in spans if span.part == "request")
            assert request.attributes.get("pdserve.client_request.id") == (given or None), path
            assert request.attributes["pdserve.request.id"] == response.headers["x-request-id"]
    sent = [call.request.client_request_id for role in ("prefill", "decode") for call in cluster.of(role).calls]
    assert set(sent) == {name, ""}
    assert sent.count(name) * 2 == sent.count("")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (b"x" * 257, "x-request-id has 257 characters, at most 256 are allowed"),
        (b"a\x85b", "x-request-id has U+0085 at character 1, only printable characters are allowed"),
    ],
)
async def test_a_name_in_a_header_is_short_and_one_line(cluster, given, told):
    await cluster.start()
    bodies = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/embeddings": {"input": "x"},
    }
    for path, body in bodies.items():
        response = await cluster.http.post(path, json=body, headers={"x-request-id": given})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["message"]) == (400, "x-request-id", told), path
        assert (await cluster.http.post(path, json=body, headers={"x-request-id": "x" * 256})).status_code == 200
    assert (await scrape(cluster))["pdserve_errors_total", "invalid_request"] == len(bodies)


async def test_a_caller_that_does_not_sample_is_not_traced(cluster, collector):
    await cluster.start()
    trace_id, headers = trace()
    quiet = {"traceparent": headers["traceparent"][:-2] + "00"}
    assert (await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=quiet)).status_code == 200
    for role in ("prefill", "decode"):
        sent = cluster.of(role).calls[0].request.trace_headers["traceparent"]
        assert sent.split("-")[1::2] == [trace_id, "00"]
    other, headers = trace()
    assert (await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
    await spans_of(collector, other, 4)
    assert collector.trace_ids() == {other}


async def test_answers_and_errors_have_the_traces_id(cluster, collector):
    """`traceparent` names the request's own span, also where its trace is not sampled; what is refused before has none."""
    await cluster.start(prefill=0)
    seen = set()
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("completions", {"prompt": "x"}),
        ("completions", {"prompt": "x", "user": "whose request fails"}),
    ):
        trace_id, headers = trace()
        if "user" in body:
            cluster.of("decode").scripts = [play(ADMITTED, InternalError("broken"))] * 5
        response = await cluster.http.post(f"/v1/{path}", json=body, headers=headers)
        assert response.status_code == (500 if "user" in body else 200)
        _, found, span_id, flags = response.headers["traceparent"].split("-")
        assert (found, flags) == (trace_id, "01")
        (root,) = (span for span in await spans_of(collector, trace_id, 4) if span.part == "request")
        assert root.span_id == span_id
        seen.add(span_id)
    assert len(seen) == 3
    assert "traceparent" not in (await cluster.http.post("/v1/completions", json={"prompt": 7.5})).headers
    cluster.of("decode").scripts = []
    quiet = {"traceparent": headers["traceparent"][:-2] + "00"}
    response = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=quiet)
    assert response.headers["traceparent"].split("-")[1::2] == [trace_id, "00"]


async def test_calls_have_the_traces_id_in_metadata(cluster, collector):
    await cluster.start()
    trace_id, headers = trace()
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[5, 6]))
    call = cluster.grpc.Generate(request, metadata=tuple(headers.items()))
    initial = dict(await call.initial_metadata())
    assert initial["traceparent"].split("-")[1] == trace_id
    assert initial["x-request-id"]
    assert [message async for message in call]
    cluster.of("decode").scripts = [play(ADMITTED, InternalError("broken"))] * 5
    call = cluster.grpc.Generate(request, metadata=tuple(headers.items()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["traceparent"].split("-")[1] == trace_id
    assert trailing["x-request-id"] not in ("", initial["x-request-id"])
    embed = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text="x"))])
    call = cluster.grpc.Embed(embed, metadata=tuple(headers.items()))
    assert (await call).embeddings
    assert dict(await call.initial_metadata())["traceparent"].split("-")[1] == trace_id


async def test_a_router_that_traces_nothing_names_no_trace(cluster):
    await cluster.start(prefill=0)
    _, headers = trace()
    response = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.headers["x-request-id"]
    assert "traceparent" not in response.headers


async def test_a_strangers_trace_is_linked_and_not_joined(cluster, collector):
    """It neither chooses the trace nor whether that is sampled, and finds it by its own id."""
    await cluster.start(trust_client_trace_headers=False)
    for flags in ("01", "00"):
        trace_id, headers = trace()
        headers = {"traceparent": headers["traceparent"][:-2] + flags, "tracestate": "a=b"}
        before = collector.trace_ids()
        response = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert response.status_code == 200
        async with asyncio.timeout(HANG_S):
            while not (fresh := collector.trace_ids() - before):  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.02)
        (ours,) = fresh
        assert ours != trace_id
        (request,) = (span for span in await spans_of(collector, ours, 4) if span.part == "request")
        assert request.parent_id == ""
        assert request.links == [(trace_id, "ab" * 8)]
        assert request.attributes["pdserve.client_trace.id"] == trace_id
        assert response.headers["traceparent"].split("-")[1] == ours
        for role in ("prefill", "decode"):
            sent = cluster.of(role).calls[-1].request.trace_headers
            _, sent_id, _, sent_flags = sent["traceparent"].split("-")
            assert (sent_id, int(sent_flags, 16) & SAMPLED) == (ours, SAMPLED)
            assert "tracestate" not in sent


async def test_a_stranger_forces_no_span(cluster, collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    await cluster.start(trust_client_trace_headers=False)
    for _ in range(3):
        _, headers = trace()
        await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    sent = cluster.of("decode").calls[-1].request.trace_headers["traceparent"]
    assert not int(sent.split("-")[-1], 16) & SAMPLED
    await asyncio.sleep(0.2)
    assert collector.trace_ids() == set()


async def test_a_client_with_a_key_keeps_its_trace(cluster, collector):
    key = "a-key-of-a-client-that-is-known"
    await cluster.start(api_keys=(key,))
    trace_id, headers = trace()
    headers["authorization"] = f"Bearer {key}"
    response = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert response.status_code == 200
    (request,) = (span for span in await spans_of(collector, trace_id, 4) if span.part == "request")
    assert (request.parent_id, request.links) == ("ab" * 8, [])


async def test_without_a_collector_a_strangers_trace_goes_no_further(cluster):
    await cluster.start(trust_client_trace_headers=False)
    trace_id, headers = trace()
    await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    sent = cluster.of("decode").calls[-1].request.trace_headers["traceparent"]
    assert trace_id not in sent


@pytest.mark.parametrize(
    ("settings", "trusts"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0", "insecure": True, "no_auth": True}, False),
        ({"api_keys": ("a-key-of-a-client-that-is-known",)}, None),
        ({"host": "0.0.0.0", "front_tls_client_ca_file": "ca.pem"}, True),
        ({"trust_client_trace_headers": False}, False),
        ({"host": "0.0.0.0", "trust_client_trace_headers": True}, True),
    ],
)
def test_whose_trace_headers_are_trusted(settings, trusts):
    assert RouterSettings(**settings).trusts_trace_headers() is trusts


async def test_a_collector_that_is_not_there_fails_no_request(cluster, monkeypatch):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        await cluster.start()
        for _ in range(5):
            assert len(await cluster.text()) == 5
        async with asyncio.timeout(HANG_S):
            while not (values := await scrape(cluster))["pdserve_spans_total", "failed"]:  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.02)
    assert values["pdserve_requests_total", "length"] == 5
    assert values["pdserve_spans_total", "exported"] == 0


async def test_no_client_text_and_no_request_id_is_a_label(cluster):
    await cluster.start()
    response = await cluster.http.post(
        "/v1/completions", json={"prompt": "CANARY", "max_tokens": 3}, headers={"x-request-id": "CANARY"}
    )
    await cluster.http.post("/v1/completions", json={"prompt": "x", "model": "CANARY"})
    await cluster.http.post("/v1/CANARY", json={})
    metrics = (await cluster.http.get("/metrics")).text
    assert "CANARY" not in metrics
    assert response.headers["x-request-id"] not in metrics
    assert 'pdserve_requests_total{outcome="length"} 1.0' in metrics
