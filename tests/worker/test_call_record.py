"""Results of a call: stages, cause and outcome, and the metrics and spans that are made of them."""

from __future__ import annotations

import asyncio
import time
from operator import mul
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from pdserve.common.errors import Draining, TransferFailed
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.engine_types import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.telemetry.tracing import Tracing
from pdserve.common.timeline import to_unix_ns
from pdserve.common.worker_identity import WorkerRole
from pdserve.engine.client.messages import AbortedRequest
from pdserve.engine.request import Request
from pdserve.worker.engine_client import RequestEnd
from pdserve.worker.step_totals import StepTotals
from pdserve.worker.telemetry.call_spans import trace_call
from pdserve.worker.telemetry.call_stats import Call, CallStats
from pdserve.worker.telemetry.worker_metrics import WorkerMetrics
from pdserve.worker.transfers.transfer_messages import ReceivedBlocks
from pdserve.worker.worker_roles import WorkerRoles
from tests.support.models.kv_layouts import make_layout

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REMOTE = {"queued": 10.0, "kv_reserved": 11.0, "kv_first_landed": 12.0, "kv_landed": 13.0, "scheduled": 13.5}
LAYOUT = make_layout()


RECEIVED = ReceivedBlocks(connector_name="local", num_blocks=3, num_landed=2, given_up=["nixl"])


STATS = SchedulerStats(
    num_blocks_total=15, num_blocks_free=4, num_blocks_cached=5, num_blocks_in_use=6, num_blocks_quarantined=2,
    num_preemptions=9, prefix_cache_queries=64, external_prefix_cache_hits=48,
    num_host_blocks_used=(3,),
    prefix_cache_hits=32, store_prefix_cache_hits=16, peer_prefix_cache_hits=8, num_received_tokens=4,
    num_computed_prompt_tokens=2,
)  # fmt: skip
ENGINE = SimpleNamespace(stats=STATS, step_totals=StepTotals(), tick=12, tick_age_s=0.25, draining=False)
IDENTITY = SimpleNamespace(worker_id="decode-1", role_name="decode", layout=LAYOUT, connectors=("tcp",))


def make_record(
    call: Call = "decode", *, remote: bool = True, stop: tuple[str, ...] = ()
) -> tuple[CallStats, list[CallStats]]:
    request = EngineCoreRequest(
        request_id="r.0.0",
        prompt_token_ids=[1] * 9,
        sampling_params=SamplingParams(stop=stop),
        arrival_time=10.0,
        remote_prefill=remote,
        client_request_id="order 7",
        trace_headers={TRACEPARENT: PARENT},
    )
    closed: list[CallStats] = []
    record = CallStats(call, request, closed.append)
    if call == "decode" and remote:
        record.transfer = RECEIVED
    return record, closed


def stages_of(record: CallStats) -> list[tuple[str, float, float, str | None]]:
    return [(s.name, s.start, s.end, s.cause.code if s.cause else None) for s in record.stages()]


def test_a_decode_call_that_went_well() -> None:
    record, closed = make_record()
    with record:
        record.take(EngineCoreOutput(request_id="r", new_token_ids=[5], moments=REMOTE | {"first_token": 14.0}))
        record.take(
            EngineCoreOutput(request_id="r", events=[
                EngineCoreEvent(EngineCoreEventType.SCHEDULED, 13.5),
                EngineCoreEvent(EngineCoreEventType.PREEMPTED, 15.0),
            ])
        )  # fmt: skip
        last = EngineCoreOutput(
            request_id="r", new_token_ids=[6, 7], finish_reason=FinishReason.LENGTH,
            moments=REMOTE | {"first_token": 14.0, "finished": 20.0}, num_preemptions=2,
        )  # fmt: skip
        record.take(last)
    record.close(RequestEnd(received=RECEIVED))
    assert closed == [record]
    assert record.outcome == "ok"
    assert (record.num_output_tokens, record.num_preemptions) == (3, 2)
    assert record.preempted_at == [15.0]
    assert stages_of(record) == [
        ("decode.reserve", 10.0, 11.0, None),
        ("kv.transfer", 11.0, 13.0, None),
        ("decode.queue", 13.0, 13.5, None),
        ("decode.generate", 13.5, 20.0, None),
    ]


def test_a_transfer_that_failed_is_where_the_cause_stands() -> None:
    record, _ = make_record()
    error = TransferFailed("the wire broke")
    moments = {"queued": 10.0, "kv_reserved": 11.0, "finished": 12.5}
    record.take(EngineCoreOutput(request_id="r", moments=moments, error_code=error.code, error_message="x"))
    with pytest.raises(TransferFailed), record:
        raise error
    record.close(RequestEnd(received=RECEIVED))
    assert record.outcome == "transfer_failed"
    assert stages_of(record) == [
        ("decode.reserve", 10.0, 11.0, None),
        ("kv.transfer", 11.0, 12.5, "transfer_failed"),
    ]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_a_call_that_the_router_ended_has_what_the_engine_knew(error: BaseException) -> None:
    record, _ = make_record("prefill", remote=False)
    with pytest.raises(type(error)), record:
        raise error
    aborted = Request(record.request)
    aborted.moments |= {"scheduled": 11.0, "finished": time.monotonic() + 5}
    aborted.prefill_chunks = [(12.0, 4)]
    record.close(RequestEnd(AbortedRequest.of(aborted)))
    assert record.outcome == "cancelled"
    queue, compute = record.stages()
    assert (queue.name, queue.cause) == ("prefill.queue", None)
    assert (compute.name, compute.start, compute.end) == ("prefill.compute", 11.0, record.ended_at)
    assert compute.cause is not None
    assert compute.cause.code == "cancelled"
    assert record.prefill_chunks == [(12.0, 4)]


def test_a_router_that_found_a_stop_string_is_no_failure() -> None:
    record, _ = make_record(stop=("END",))
    record.take(EngineCoreOutput(request_id="r", new_token_ids=[5], moments=REMOTE | {"first_token": 14.0}))
    with pytest.raises(asyncio.CancelledError), record:
        raise asyncio.CancelledError
    record.close(RequestEnd(received=RECEIVED))
    assert record.outcome == "ok"
    assert all(stage.cause is None for stage in record.stages())


def test_a_call_that_was_refused_has_a_stage_and_a_cause() -> None:
    record, _ = make_record("prefill", remote=False)
    with pytest.raises(Draining), record:
        raise Draining("the worker is draining")
    record.close()
    ((name, start, _, cause),) = stages_of(record)
    assert (name, start, cause) == ("prefill.queue", 10.0, "draining")


def test_decode_that_prefills_itself_has_prefill_stages() -> None:
    for record in (make_record(remote=False)[0], make_record()[0]):
        record.take(EngineCoreOutput(request_id="r", prefills_locally=True))
        moments = {"queued": 10.0, "scheduled": 11.0, "first_token": 12.0, "finished": 15.0}
        record.take(EngineCoreOutput(request_id="r", new_token_ids=[1, 2], moments=moments, prefill_chunks=[(11.5, 9)]))
        assert [stage[:3] for stage in stages_of(record)] == [
            ("prefill.queue", 10.0, 11.0),
            ("prefill.compute", 11.0, 12.0),
            ("decode.generate", 12.0, 15.0),
        ]


def test_an_error_of_ours_is_internal() -> None:
    record, _ = make_record()
    with pytest.raises(ZeroDivisionError), record:
        raise ZeroDivisionError
    assert record.outcome == "internal_error"


def closed_records() -> list[CallStats]:
    """Two that went well, one whose transfer failed."""
    good, _ = make_record()
    moments = REMOTE | {"first_token": 14.0, "finished": 20.0}
    good.take(
        EngineCoreOutput(
            request_id="r", new_token_ids=[5, 6], moments=moments, cached_tokens=CachedTokens(pool=3, host=1)
        )
    )
    computed, _ = make_record("prefill", remote=False)
    computed.take(
        EngineCoreOutput(
            request_id="r", new_token_ids=[5], prefill_chunks=[(11.0, 4), (12.0, 5)],
            moments={"queued": 10.0, "scheduled": 10.5, "first_token": 12.0, "finished": 12.0},
        )
    )  # fmt: skip
    bad, _ = make_record()
    bad.moments |= {"kv_reserved": 11.0, "finished": 12.0}
    bad.cause = TransferFailed("the wire broke")
    return [good, computed, bad]


ROLES = WorkerRoles(WorkerRole.DECODE, {}, "it has one", lambda: None)


def make_metrics(
    stats: SchedulerStats = STATS, identity: SimpleNamespace = IDENTITY
) -> tuple[WorkerMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    transfers = SimpleNamespace(num_open=3, num_pinned=2, num_fallbacks=1, num_ended={("source", "expired"): 2})
    fields = {**vars(ENGINE), "stats": stats, "transfer_counts": transfers, "known_adapters": {"sql": "1" * 32}}
    return WorkerMetrics(registry, identity, SimpleNamespace(**fields), ROLES), registry  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [(), (0, 0), (3, 2)])
def test_bytes_in_host_memory_are_those_of_every_shape(used: tuple[int, ...]) -> None:
    [shape] = LAYOUT.shapes
    other = msgspec.structs.replace(shape, num_layers=5)
    layout = msgspec.structs.replace(LAYOUT, shapes=(shape, other), group_shapes=(0, 1), group_windows=(0, 2))
    stats = msgspec.structs.replace(STATS, num_host_blocks_used=used)
    _, registry = make_metrics(stats, SimpleNamespace(**{**vars(IDENTITY), "layout": layout}))
    expected = sum(map(mul, used, (shape.block_bytes, other.block_bytes)))
    assert registry.get_sample_value("pdserve_kv_host_bytes") == expected


def test_metrics_count_what_the_records_say() -> None:
    metrics, registry = make_metrics()
    for record in closed_records():
        metrics.call(record)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("pdserve_lora_adapters", state="offered") == 1
    assert value("pdserve_lora_adapters", state="loaded") == 0
    assert value("pdserve_calls_total", call="decode", outcome="ok") == 1
    assert value("pdserve_calls_total", call="prefill", outcome="ok") == 1
    assert value("pdserve_call_errors_total", code="transfer_failed") == 1
    assert value("pdserve_kv_transfer_blocks_total", connector="local") == 4
    assert value("pdserve_kv_transfer_bytes_total", connector="local") == 4 * LAYOUT.shapes[0].block_bytes
    assert value("pdserve_kv_transfer_seconds_count", connector="local") == 1
    assert value("pdserve_kv_transfer_seconds_sum", connector="local") == 2
    assert value("pdserve_decode_generate_seconds_sum") == 6.5
    assert value("pdserve_decode_reserve_seconds_count") == 2
    assert value("pdserve_prefill_queue_seconds_sum") == 0.5
    assert value("pdserve_sampled_tokens_total") == 3
    assert [value("pdserve_kv_blocks", state=state) for state in ("free", "cached", "in_use")] == [4, 5, 6]
    assert value("pdserve_kv_blocks_quarantined") == 2
    assert value("pdserve_kv_blocks_pinned") == 2
    assert value("pdserve_preemptions_total") == 9
    found = {"pool": 32, "host": 48, "store": 16, "peer": 8, "transfer": 4, "computed": 2}
    assert {source: value("pdserve_prompt_tokens_by_source_total", source=source) for source in found} == found
    assert value("pdserve_kv_host_bytes") == 3 * LAYOUT.shapes[0].block_bytes
    assert value("pdserve_engine_tick_age_seconds") == 0.25
    assert value("pdserve_open_transfers") == 3
    assert value("pdserve_kv_transfer_fallbacks_total") == 1
    assert value("pdserve_draining") == 0


def test_blocks_that_a_prefill_call_read_from_another_worker_count() -> None:
    metrics, registry = make_metrics()
    record, _ = make_record("prefill", remote=False)
    record.transfer = RECEIVED
    metrics.call(record)
    metrics.received(RECEIVED)
    metrics.received(None)
    blocks, num_bytes, transfers = (
        registry.get_sample_value(f"pdserve_kv_transfer_{name}", {"connector": "local"})
        for name in ("blocks_total", "bytes_total", "seconds_count")
    )
    assert (blocks, num_bytes) == (4, 4 * LAYOUT.shapes[0].block_bytes)
    assert not transfers, "no decode call has waited for them"


def test_spans_say_what_the_records_say() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(Resource({}), SimpleSpanProcessor(exporter))
    good, computed, bad = closed_records()
    good.preempted_at = [14.5]
    for record in (good, computed, bad):
        trace_call(tracing, record, "worker-1", 64)
    bad.request = msgspec.structs.replace(bad.request, trace_headers={TRACEPARENT: PARENT[:-2] + "00"})
    trace_call(tracing, bad, "worker-1", 64)
    spans: Any = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert names == [
        "decode.reserve", "kv.transfer", "decode.queue", "decode.generate", "prefill.queue", "prefill.compute",
        "decode.reserve", "kv.transfer",
    ]  # fmt: skip
    for span in spans:
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        assert span.attributes["pdserve.worker.id"] == "worker-1"
        assert span.attributes["pdserve.client_request.id"] == "order 7"
    transfer, generate, compute, failed = spans[1], spans[3], spans[5], spans[7]
    assert (transfer.start_time, transfer.end_time) == (to_unix_ns(11.0), to_unix_ns(13.0))
    assert transfer.attributes["pdserve.kv.bytes"] == 2 * 64
    cached = {name: value for name, value in transfer.attributes.items() if "cached_tokens" in name}
    assert cached == {
        "pdserve.prompt.cached_tokens": 4,
        "pdserve.prompt.cached_tokens.pool": 3,
        "pdserve.prompt.cached_tokens.host": 1,
    }
    assert compute.attributes["pdserve.prompt.cached_tokens"] == 0
    assert transfer.attributes["pdserve.kv.fallbacks"] == ("nixl",)
    assert [event.name for event in transfer.events] == ["first_landing", "last_landing"]
    assert generate.attributes["gen_ai.usage.output_tokens"] == 2
    preempted = generate.events[-1]
    assert (preempted.name, preempted.timestamp) == ("preempted", to_unix_ns(14.5))
    assert [event.attributes["pdserve.chunk.tokens"] for event in compute.events] == [4, 5]
    assert failed.attributes["error.type"] == "transfer_failed"
    assert not failed.status.is_ok
    tracing.close()


def test_an_embedding_ends_with_its_prompt() -> None:
    request = EngineCoreRequest(
        request_id="r.0.0", prompt_token_ids=[1] * 9, pooling_params=PoolingParams(), arrival_time=10.0
    )
    closed: list[CallStats] = []
    record = CallStats("prefill", request, closed.append)
    with record:
        moments = {"scheduled": 10.5, "finished": 12.0}
        record.take(
            EngineCoreOutput(
                request_id="r.0.0", finish_reason=FinishReason.STOP, moments=moments, pooling_output=[0.5, 0.5]
            )
        )
    record.close()
    assert [(stage.name, stage.start, stage.end, stage.cause) for stage in record.stages()] == [
        ("prefill.queue", 10.0, 10.5, None),
        ("prefill.compute", 10.5, 12.0, None),
    ]
    assert (record.outcome, closed) == ("ok", [record])
