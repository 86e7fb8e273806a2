"""One request, one trace over router, prefill and decode (I12): the whole tree, its times, and what became of it."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.common.net.public_server import make_public_channel
from pdserve.common.timeline import PATH_PHASES
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.processes.redis_server import redis_server
from tests.support.run.waiting import HANG_S, eventually, wait_until

pytestmark = pytest.mark.process

PARENT_OF = {
    "tokenize": "request",
    "route": "request",
    "attempt": "request",
    "prefill.queue": "attempt",
    "prefill.compute": "attempt",
    "decode.reserve": "attempt",
    "kv.transfer": "attempt",
    "decode.queue": "attempt",
    "decode.generate": "attempt",
}
SERVICE_OF = {
    name: f"pdserve-{'router' if PARENT_OF[name] == 'request' else 'prefill' if name.startswith('prefill') else 'decode'}"
    for name in PARENT_OF
}
ROLES = ("prefill", "decode")
SPANS = {"request", *PARENT_OF}
WITHIN = 0.03


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def cluster(
    tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver
) -> Iterator[Cluster]:
    """A router, two prefill and two decode workers, which find each other through a real Redis."""
    folder = tmp_path_factory.mktemp("traced")
    with redis_server(folder) as redis, running_cluster(folder) as cluster:
        flags = ("--model", str(tiny_checkpoints("llama")), "--redis", redis.url)
        worker = (*flags, "--dtype=float32", "--max-num-batched-tokens=64")
        for role in ("prefill", "decode"):
            for number in range(2):
                cluster.start_worker(role, *worker, name=f"{role}-{number}")
        router = cluster.start_router(*flags, "--local-prefill", "never", "--policy", "round_robin")
        wait_for_workers(router, 2)
        yield cluster
        cluster.check_pools()
        cluster.check_logs()


def wait_for_workers(router: Service, number: int) -> None:
    """Until the router has found so many of each role."""

    def found() -> bool:
        workers = httpx.get(f"http://{router.http}/health", timeout=HANG_S, trust_env=False).json()["workers"]
        return all(workers[role]["live"] == number for role in ("prefill", "decode"))

    wait_until(found, lambda: f"{number} workers of each role are found:\n{router.read_log()}")


def start(
    channel: grpc.aio.Channel, prompt: list[int], max_tokens: int, trace_id: str
) -> grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=prompt),
        sampling=request_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        stream=True,
        client_request_id=f"mine {trace_id}",
    )
    metadata = (("traceparent", f"00-{trace_id}-{'ab' * 8}-01"),)
    return inference_pb2_grpc.InferenceServiceStub(channel).Generate(
        request, timeout=HANG_S, metadata=metadata, wait_for_ready=True
    )


def spans_of(collector: OtlpReceiver, trace_id: str, names: set[str] = SPANS) -> dict[str, ReceivedSpan]:
    """Spans by name; all in one trace, each once."""
    spans = collector.wait_for(lambda spans: {span.part for span in spans} >= names, trace_id)
    by_name = {span.part: span for span in spans}
    assert len(by_name) == len(spans), [span.part for span in spans]
    return by_name


def check_tree(spans: dict[str, ReceivedSpan], *, cut_short: bool = False) -> None:
    """Parents, services, and children inside their parents."""
    for name, span in spans.items():
        if name in ("request", "admission"):
            continue
        parent = spans[PARENT_OF[name]]
        assert span.parent_id == parent.span_id, name
        assert (span.service, span.version) == (SERVICE_OF[name], version("pdserve")), name
        assert parent.start_ns <= span.start_ns <= span.end_ns, name
        # a worker that is told to stop does so after the router has: there is no moment by which it must
        if not (cut_short and span.failed and span.service != "pdserve-router"):
            assert span.end_ns <= parent.end_ns, (name, span.end_ns - parent.end_ns)


def check_path(spans: dict[str, ReceivedSpan]) -> None:
    """The phases add up to the whole, and are what the services' own spans say."""
    whole = spans["request"]
    phases = {
        phase: whole.attributes[f"pdserve.phase.{phase}_s"]
        for phase in PATH_PHASES
        if f"pdserve.phase.{phase}_s" in whole.attributes
    }
    tolerance = WITHIN * whole.seconds
    assert sum(phases.values()) == pytest.approx(whole.seconds, abs=tolerance)
    computed, transfer = spans["prefill.compute"], spans["kv.transfer"]
    measured = {
        "tokenize": spans["tokenize"].seconds,
        "route": spans["route"].seconds,
        "prefill_queue": spans["prefill.queue"].seconds,
        "prefill": computed.seconds,
        "kv_exposed": (transfer.end_ns - max(computed.end_ns, transfer.start_ns)) / 1e9,
        "decode_queue": spans["decode.queue"].seconds,
        "decode": spans["decode.generate"].seconds,
    }
    for phase, seconds in measured.items():
        assert phases[phase] == pytest.approx(seconds, abs=tolerance), phase
    # nothing of the transfer hides in a queue: each begins where the one before it ends
    assert spans["decode.reserve"].end_ns == transfer.start_ns
    assert transfer.end_ns == spans["decode.queue"].start_ns
    assert spans["decode.queue"].end_ns == spans["decode.generate"].start_ns
    assert spans["prefill.queue"].end_ns == computed.start_ns


async def test_i12_every_request_has_one_trace_over_all_services(cluster: Cluster, collector: OtlpReceiver) -> None:
    """I12."""
    trace_ids = [secrets.token_hex(16) for _ in range(8)]
    async with make_public_channel(cluster.router.address) as channel:

        async def ask(number: int) -> int:
            call = start(channel, prompt_of(100 + 30 * number, number), 12, trace_ids[number])
            return sum([len(message.token_ids) async for message in call])

        assert await asyncio.gather(*map(ask, range(8))) == [12] * 8
    workers = set()
    for number, trace_id in enumerate(trace_ids):
        spans = spans_of(collector, trace_id)
        check_tree(spans)
        check_path(spans)
        assert not any(span.failed for span in spans.values())
        request, transfer = spans["request"], spans["kv.transfer"]
        num_tokens = 100 + 30 * number
        assert request.parent_id == "ab" * 8
        assert request.attributes["gen_ai.usage.input_tokens"] == num_tokens
        assert request.attributes["gen_ai.usage.output_tokens"] == 12
        assert set(spans["route"].attributes["pdserve.route.candidates"]) == {f"{r}-{n}" for r in ROLES for n in (0, 1)}
        assert spans["prefill.compute"].events == ["chunk"] * spans["prefill.compute"].events.count("chunk")
        assert len(spans["prefill.compute"].events) >= -(-num_tokens // 64)
        assert transfer.attributes["pdserve.kv.connector"] in ("tcp", "nixl")
        assert transfer.attributes["pdserve.kv.blocks"] == -(-num_tokens // 16)
        assert transfer.attributes["pdserve.kv.bytes"] % transfer.attributes["pdserve.kv.blocks"] == 0
        assert transfer.events == ["first_landing", "last_landing"]
        assert spans["decode.generate"].events == ["first_token"]
        for name, span in spans.items():
            told = name not in ("tokenize", "admission", "route", "attempt")
            assert span.attributes.get("pdserve.client_request.id") == (f"mine {trace_id}" if told else None), name
        workers |= {span.attributes.get("pdserve.worker.id") for span in spans.values()} - {None}
    assert workers == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


async def test_a_request_without_a_context_begins_a_trace(cluster: Cluster, collector: OtlpReceiver) -> None:
    before = collector.trace_ids()
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http}", trust_env=False, timeout=HANG_S) as client:
        response = await client.post("/v1/completions", json={"prompt": "a question", "max_tokens": 3})
    assert response.status_code == 200, response.text

    def fresh() -> set[str]:
        return collector.trace_ids() - before

    (trace_id,) = await eventually(fresh, "a trace of the request")
    spans = spans_of(collector, trace_id)
    check_tree(spans)
    assert spans["request"].parent_id == ""
    assert spans["request"].attributes["pdserve.request.id"] == response.headers["x-request-id"]
    form, *ids, flags = response.headers["traceparent"].split("-")
    assert (form, ids) == ("00", [trace_id, spans["request"].span_id])
    assert int(flags, 16) & 1, "it is sampled"


async def test_an_aborted_request_has_its_spans_and_says_why(cluster: Cluster, collector: OtlpReceiver) -> None:
    trace_id = secrets.token_hex(16)
    async with make_public_channel(cluster.router.address) as channel:
        call = start(channel, prompt_of(200, 40), 1500, trace_id)
        num_tokens = 0
        async for message in call:
            num_tokens += len(message.token_ids)
            if num_tokens > 3:
                break
        call.cancel()
    spans = spans_of(collector, trace_id)
    check_tree(spans, cut_short=True)
    whole = spans["request"]
    for name in ("request", "attempt", "decode.generate"):
        assert spans[name].failed, name
        assert spans[name].cause.startswith("cancelled: "), name
        assert spans[name].attributes["error.type"] == "cancelled"
    assert not spans["prefill.compute"].failed
    phases = [value for name, value in whole.attributes.items() if name.startswith("pdserve.phase.")]
    assert sum(phases) == pytest.approx(whole.seconds, rel=WITHIN)
    assert spans["decode.generate"].attributes["gen_ai.usage.output_tokens"] >= num_tokens - 1


async def test_every_service_has_metrics_and_health(cluster: Cluster) -> None:
    async with make_public_channel(cluster.router.address) as channel:
        async for _ in start(channel, prompt_of(64, 80), 4, secrets.token_hex(16)):
            pass
    totals: dict[str, float] = {}
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as client:
        for service in cluster.services.values():
            if service.role == "router":
                base = f"http://{service.http}"
            else:
                base = re.findall(r"metrics (http://\S+)/metrics", service.read_log())[-1]
            assert (await client.get(f"{base}/health")).status_code == 200, service.name
            response = await client.get(f"{base}/metrics")
            assert response.status_code == 200
            samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
            for sample in samples:
                totals[sample.name] = totals.get(sample.name, 0) + sample.value
            exported = [
                s.value for s in samples if s.name == "pdserve_spans_total" and s.labels["outcome"] != "exported"
            ]
            assert exported == [0, 0]
            assert [s.value for s in samples if s.name == "pdserve_redis_up"] == [1]
            if service.role != "router":
                blocks = sum(s.value for s in samples if s.name == "pdserve_kv_blocks")
                assert blocks == cluster.load(service).blocks_total
                assert (await client.get(f"{base}/nothing")).status_code == 404
    for name in (
        "pdserve_time_to_first_token_seconds_count",
        "pdserve_inter_token_latency_seconds_count",
        "pdserve_prefill_compute_seconds_count",
        "pdserve_kv_transfer_seconds_count",
        "pdserve_kv_transfer_bytes_total",
        "pdserve_decode_generate_seconds_count",
        "pdserve_placements_total",
    ):
        assert totals[name] > 0, name
    assert totals["pdserve_kv_transfer_blocks_total"] >= 4
