"""Setting tracing up: which collector, from which settings; and collectors that do not answer."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdserve.common.address.host_address import masked_url
from pdserve.common.errors import ConfigError, InvalidRequest, TransferFailed
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.settings.collector import read_collector
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.common.telemetry.span_export import SHUTDOWN_TIMEOUT_S, SpanExport
from pdserve.common.telemetry.telemetry import Telemetry, make_telemetry
from pdserve.common.telemetry.tracing import Event, Tracing
from tests.support.processes.otlp_receiver import otlp_receiver
from tests.support.run.waiting import HANG_S

CALLER = {TRACEPARENT: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
NOT_SAMPLED = {TRACEPARENT: CALLER[TRACEPARENT][:-2] + "00"}


class KeptSpans(SpanExporter):
    """Keeps what it is given; refuses while told to."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.refuses = False
        self.exported = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go_on.wait(10 * HANG_S)
        if not self.refuses:
            self.spans += spans
        self.exported.release()
        return SpanExportResult.FAILURE if self.refuses else SpanExportResult.SUCCESS


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


def tracing_into(exporter: SpanExporter) -> Telemetry:
    export = SpanExport(exporter, "the test")
    return Telemetry(Tracing(Resource({"service.name": "test"}), export), export.counts)


ENDPOINT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_ENDPOINT, TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({ENDPOINT: "http://b:2"}, (ENDPOINT, "http://b:2", "http/protobuf")),
        ({ENDPOINT: "https://b:2/otlp", PROTOCOL: "grpc"}, (ENDPOINT, "https://b:2/otlp", "grpc")),
        ({TRACES_ENDPOINT: "http://a:1", ENDPOINT: "http://b:2"}, (TRACES_ENDPOINT, "http://a:1", "http/protobuf")),
        (
            {TRACES_ENDPOINT: "http://a:1", TRACES_PROTOCOL: "grpc", PROTOCOL: "http/protobuf"},
            (TRACES_ENDPOINT, "http://a:1", "grpc"),
        ),
        ({ENDPOINT: "http://b:2", "OTEL_SDK_DISABLED": "no"}, (ENDPOINT, "http://b:2", "http/protobuf")),
        ({ENDPOINT: "http://b:2", "OTEL_SDK_DISABLED": "TRUE"}, None),
        ({ENDPOINT: "http://b:2", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({ENDPOINT: " "}, None),
        ({PROTOCOL: "grpc", "OTEL_SERVICE_NAME": "mine"}, None),
    ],
)
def test_standard_variables_name_the_collector(environ: dict[str, str], expected: tuple[str, str, str] | None) -> None:
    assert read_collector(environ) == expected


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({ENDPOINT: "localhost:4317"}, f"{ENDPOINT} has no host"),
        ({ENDPOINT: "grpc://host:1"}, f"{ENDPOINT} has no host, or another scheme than http, https"),
        ({ENDPOINT: "http://"}, f"{ENDPOINT} has no host"),
        ({TRACES_ENDPOINT: "http://host:port"}, f"{TRACES_ENDPOINT} has no valid host and port"),
        ({ENDPOINT: "http://[::1"}, f"{ENDPOINT} has no valid host and port"),
        ({ENDPOINT: "http://127.0.0.1:1", PROTOCOL: "http/json"}, f"{PROTOCOL} is 'http/json', one of"),
    ],
)
@pytest.mark.parametrize("kind", [RouterSettings, PrefillSettings])
def test_a_collector_that_cannot_be_used_is_named(
    environ: dict[str, str], told: str, kind: type[RouterSettings | PrefillSettings]
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(kind, environ=environ)


@pytest.mark.parametrize("scheme", ["http", "https", "grpc", "ftp", "http://[::1", "x"])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf", "x"])
def test_a_password_in_the_url_stands_in_no_text(scheme: str, protocol: str) -> None:
    url = f"{scheme}://someone:s3cr3t@host:4318/path?token=t0k3n#fr4g"
    collector = read_collector({ENDPOINT: url, PROTOCOL: protocol})
    assert collector is not None
    texts = [str(collector), masked_url(url.replace("://", ":"))]
    try:
        collector.verify(insecure=False)
    except ConfigError as error:
        texts.append(error.message)
    for text in texts:
        assert not any(part in text for part in ("s3cr3t", "someone", "t0k3n", "fr4g"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:4318/path", "http://host:4318/path"),
        ("https://user@[::1]:1", "https://***@[::1]:1"),
        ("grpc://host?x=1", "grpc://host?***"),
        ("host:4317", "***"),
        ("http://host:port", "***"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_neither_the_log_nor_a_failing_export_shows_the_password(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv(ENDPOINT, f"http://someone:s3cr3t@127.0.0.1:{silent.getsockname()[1]}/?token=t0k3n")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        telemetry = make_telemetry("router", "one")
        assert telemetry is not None
        telemetry.tracing.root("request", CALLER, 1000, {}).end(1500)
        telemetry.tracing.close()
    ours = "\n".join(
        record.getMessage() for record in caplog.records if record.name.startswith(("pdserve", "opentelemetry"))
    )
    assert "spans go to http://***@127.0.0.1:" in ours
    assert "spans cannot be exported to http://***@127.0.0.1:" in ours
    assert not any(part in ours for part in ("s3cr3t", "someone", "t0k3n"))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"metrics_port": 70_000}, "metrics_port is 70000"),
        ({"metrics_host": "0.0.0.0"}, "metrics_host is '0.0.0.0'"),
    ],
)
def test_settings_outside_their_limits_are_named(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(PrefillSettings, flags=flags, environ={})


def test_nothing_is_traced_unless_asked_for() -> None:
    assert make_telemetry("router", "one") is None


def test_spans_with_events_status_and_the_callers_trace() -> None:
    kept = KeptSpans()
    tracing, counts = tracing_into(kept)
    root = tracing.root("request", CALLER, 1000, {"a": 1})
    child = root.start("attempt", 1100)
    there = tracing.below(child.headers)
    assert there is not None
    there.add("work", 1200, 1300, {"b": "x"}, [Event("half", 1250)], TransferFailed("the wire broke"))
    child.end(1400)
    root.end(1500)
    tracing.close()
    assert counts.exported == 3
    work, attempt, request = kept.spans
    assert {f"{span.context.trace_id:032x}" for span in kept.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert work.parent and attempt.parent and request.parent  # noqa: PT018
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert (work.parent.span_id, attempt.parent.span_id) == (attempt.context.span_id, request.context.span_id)
    assert (work.start_time, work.end_time, work.events[0].timestamp) == (1200, 1300, 1250)
    assert work.attributes == {"b": "x", "error.type": "transfer_failed"}
    assert work.status.description == "transfer_failed: the wire broke"
    assert request.status.is_unset
    assert child.headers["tracestate"] == "a=b"


def test_the_status_of_a_bad_request_repeats_nothing_that_the_client_sent() -> None:
    kept = KeptSpans()
    tracing, _ = tracing_into(kept)
    for field in ("messages", None):
        tracing.root("request", CALLER, 1000, {}).end(1500, error=InvalidRequest("the secret of the client", field))
    tracing.close()
    assert [span.status.description for span in kept.spans] == ["invalid_request: messages", "invalid_request: "]


def test_a_trace_that_is_not_sampled_goes_on_as_such() -> None:
    kept = KeptSpans()
    tracing, counts = tracing_into(kept)
    root = tracing.root("request", NOT_SAMPLED, 1000, {})
    child = root.start("attempt", 1100)
    assert child.headers[TRACEPARENT].endswith("-00")
    assert NOT_SAMPLED[TRACEPARENT].split("-")[1] in child.headers[TRACEPARENT]
    assert tracing.below(child.headers) is None
    assert tracing.below({}) is None
    root.add("work", 1, 2)
    child.end(2)
    root.end(3)
    tracing.close()
    assert kept.spans == []
    assert counts.exported == 0


def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    kept = KeptSpans()
    kept.may_go_on.clear()
    tracing, counts = tracing_into(kept)
    # a span whose end waited for the collector would wait here for longer than the test may take
    for number in range(100):
        tracing.root("request", {}, number, {}).end(number + 1)
    assert counts.dropped >= 100 - 2 * 4
    kept.may_go_on.set()
    tracing.close()
    assert counts.exported + counts.dropped == 100


def test_a_collector_that_refuses_is_told_once_and_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = KeptSpans()
    tracing, counts = tracing_into(kept)
    kept.refuses = True
    for _ in range(3):
        tracing.root("request", {}, 1, {}).end(2)
        assert kept.exported.acquire(timeout=HANG_S)
    kept.refuses = False
    tracing.root("request", {}, 1, {}).end(2)
    assert kept.exported.acquire(timeout=HANG_S)
    tracing.close()
    assert (counts.failed, counts.exported) == (3, 1)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "cannot be exported to the test" in warnings[0]
    assert "again; 3 were lost" in warnings[1]


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("listens", [False, True])
def test_a_collector_that_does_not_answer_costs_one_line(
    protocol: str, listens: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there; and somebody who takes the connection and says nothing."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2" if protocol == "http/protobuf" else "1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv(PROTOCOL, protocol)
        telemetry = make_telemetry("router", "one")
        assert telemetry is not None
        began = time.monotonic()
        for _ in range(1000):
            telemetry.tracing.root("request", {}, 1, {}).end(2)
        assert time.monotonic() - began < 1000 * 0.2 / 10, "they waited for the collector"
        began = time.monotonic()
        telemetry.tracing.close()
        assert time.monotonic() - began < 2 * SHUTDOWN_TIMEOUT_S
    assert telemetry.counts.exported == 0
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 1
    assert all("cannot be exported" in warning for warning in warnings)


def test_a_collector_that_hangs_costs_a_stop_no_more_than_its_limit() -> None:
    kept = KeptSpans()
    kept.may_go_on.clear()
    tracing, counts = tracing_into(kept)
    for number in range(10):
        tracing.root("request", {}, number, {}).end(number + 1)
    began = time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 2 * SHUTDOWN_TIMEOUT_S
    assert counts.exported == 0
    kept.may_go_on.set()


def test_the_sampler_is_that_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    kept = KeptSpans()
    tracing, counts = tracing_into(kept)
    tracing.root("request", CALLER, 1, {}).end(2)
    tracing.close()
    assert (kept.spans, counts.dropped) == ([], 0)


def test_a_collector_over_grpc_gets_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_receiver() as collector:
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=lost,team=a%20b")
        telemetry = make_telemetry("router", "one")
        assert telemetry is not None
        root = telemetry.tracing.root("request", CALLER, 1, {"x": 1})
        root.end(2)
        telemetry.tracing.close()
        (span,) = collector.wait_for(bool, "0af7651916cd43dd8448eb211c80319c")
        assert (span.name, span.service, span.attributes) == ("request", "lost", {"x": 1})
        assert telemetry.counts.exported == 1
