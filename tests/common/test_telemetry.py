"""Setting tracing up: which collector, from which settings; and collectors that do not answer."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdserve.common.address.host_address import masked_url
from pdserve.common.errors import ConfigError, InvalidRequest, TransferFailed
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import describe, load_settings
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.common.telemetry.span_export import SHUTDOWN_TIMEOUT_S, SpanExport
from pdserve.common.telemetry.telemetry import OtlpEndpoint, Telemetry, make_telemetry, parse_endpoint, parse_pairs
from pdserve.common.telemetry.tracing import Event, Tracing, make_sampler
from tests.support.otlp_receiver import otlp_receiver
from tests.support.waiting import HANG_S

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


def tracing_into(exporter: SpanExporter, sampler: str = "parentbased_always_on", **options: int) -> Telemetry:
    export = SpanExport(exporter, "the test", every_s=0.01, **options)
    return Telemetry(Tracing({"service.name": "test"}, make_sampler(sampler, 1.0), export), export.counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        ("grpc://127.0.0.1:4317", None, ("grpc", "127.0.0.1:4317", False)),
        ("grpc://collector", None, ("grpc", "collector:4317", False)),
        ("grpcs://[::1]:9", None, ("grpc", "[::1]:9", True)),
        ("http://localhost:4317", "grpc", ("grpc", "localhost:4317", False)),
        ("https://localhost:4317", "grpc", ("grpc", "localhost:4317", True)),
        ("http://localhost:4318", None, ("http/protobuf", "http://localhost:4318/v1/traces", False)),
        ("http://localhost:4318/", "http/protobuf", ("http/protobuf", "http://localhost:4318/v1/traces", False)),
        ("https://host/otlp", None, ("http/protobuf", "https://host/otlp/v1/traces", True)),
        ("http://host:1/v1/traces", None, ("http/protobuf", "http://host:1/v1/traces", False)),
    ],
)
def test_the_url_decides_the_protocol(url: str, protocol: str | None, expected: tuple[str, str, bool]) -> None:
    assert tuple(parse_endpoint(url, protocol)) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TRACES_ENDPOINT": "http://a:1/ingest"}, ("http/protobuf", "http://a:1/ingest", False)),
        (
            {"TRACES_ENDPOINT": "http://a:1/ingest", "ENDPOINT": "http://b:2"},
            ("http/protobuf", "http://a:1/ingest", False),
        ),
        (
            {"TRACES_ENDPOINT": "http://a:1", "TRACES_PROTOCOL": "grpc", "PROTOCOL": "http/protobuf"},
            ("grpc", "a:1", False),
        ),
        ({"ENDPOINT": "http://b:2"}, ("http/protobuf", "http://b:2/v1/traces", False)),
    ],
)
def test_the_variables_of_traces_alone(environ: dict[str, str], expected: tuple[str, str, bool]) -> None:
    variables = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environ.items()}

    def endpoint(**flags: str) -> OtlpEndpoint:
        settings = load_settings(RouterSettings, flags={"insecure": True, **flags}, environ=variables)
        assert settings.otlp is not None
        return parse_endpoint(settings.otlp, settings.otlp_protocol, is_traces_url=settings.otlp_is_traces_url)

    assert tuple(endpoint()) == expected
    variables["PDSERVE_OTLP_PROTOCOL"] = "http/protobuf"
    # our own ways to name a collector go first, and add the path
    assert endpoint(otlp="http://c:3/x").target == "http://c:3/x/v1/traces"
    variables["PDSERVE_OTLP"] = "http://d:4"
    assert endpoint().target == "http://d:4/v1/traces"


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("localhost:4317", None),
        ("grpc://", None),
        ("ftp://host:1", None),
        ("grpc://host:port", None),
        ("grpc://host:1/path", None),
        ("grpc://host:1", "http/protobuf"),
        ("http://[::1", None),
    ],
)
def test_a_url_that_cannot_be_used_is_named(url: str, protocol: str | None) -> None:
    with pytest.raises(ConfigError, match=r"otlp (has|begins)"):
        parse_endpoint(url, protocol)


@pytest.mark.parametrize("scheme", ["http", "https", "grpc", "grpcs", "ftp", "http://[::1", "x"])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf", None])
def test_a_password_in_the_url_stands_in_no_text(scheme: str, protocol: str | None) -> None:
    url = f"{scheme}://someone:s3cr3t@host:4318/path?token=t0k3n#fr4g"
    try:
        texts = [str(parse_endpoint(url, protocol))]
    except ConfigError as error:
        texts = [error.message]
    texts += [masked_url(url), masked_url(url.replace("://", ":")), describe(RouterSettings(otlp=url))]
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


def test_neither_the_log_nor_a_failing_export_shows_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        settings = RouterSettings(otlp=f"http://someone:s3cr3t@127.0.0.1:{silent.getsockname()[1]}/?token=t0k3n")
        telemetry = make_telemetry(settings, "router", "one")
        assert telemetry is not None
        telemetry.tracing.root("request", CALLER, 1000, {}).end(1500)
        telemetry.tracing.close()
    assert "spans go to http://***@127.0.0.1:" in caplog.text
    assert "spans cannot be exported to http://***@127.0.0.1:" in caplog.text
    assert not any(part in caplog.text for part in ("s3cr3t", "someone", "t0k3n"))


def test_pairs_are_decoded_and_never_shown() -> None:
    assert parse_pairs("otlp_headers", "a=1, b=x%20y,,c==") == {"a": "1", "b": "x y", "c": "="}
    with pytest.raises(ConfigError, match="otlp_headers: entry 1 is not name=value") as caught:
        parse_pairs("otlp_headers", "a=1,secret")
    assert "secret" not in caught.value.message


def test_standard_variables_are_settings() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "OTEL_SDK_DISABLED": "TRUE",
        "OTEL_SOMETHING_ELSE": "is not ours",
    }
    for kind in (RouterSettings, PrefillSettings):
        settings = load_settings(kind, environ=environ)
        assert settings.otlp == "http://127.0.0.1:4318"
        assert settings.otel_service_name == "mine"
        assert settings.otel_traces_sampler_arg == 0.25
        assert settings.otel_bsp_schedule_delay_ms == 500
        assert settings.otel_sdk_disabled
        assert "secret" not in describe(settings)
        assert make_telemetry(settings, "router", "one") is None
    ours = load_settings(
        RouterSettings, environ=environ | {"PDSERVE_OTLP": "grpc://127.0.0.2:1", "OTEL_SDK_DISABLED": "no"}
    )
    assert ours.otlp == "grpc://127.0.0.2:1"
    assert not ours.otel_sdk_disabled
    assert load_settings(RouterSettings, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": " "}).otlp is None
    with pytest.raises(ConfigError, match="otel_traces_sampler"):
        load_settings(RouterSettings, environ={"OTEL_TRACES_SAMPLER": "sometimes"})
    with pytest.raises(ConfigError, match=r"otel_traces_sampler_arg is 2\.0"):
        load_settings(RouterSettings, environ={"OTEL_TRACES_SAMPLER_ARG": "2"})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"metrics_port": 70_000}, "metrics_port is 70000"),
        ({"metrics_host": "0.0.0.0"}, "metrics_host is '0.0.0.0'"),
        ({"otel_bsp_schedule_delay_ms": 0}, "otel_bsp_schedule_delay_ms is 0"),
    ],
)
def test_settings_outside_their_limits_are_named(flags: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(PrefillSettings, flags=flags, environ={})


def test_nothing_is_traced_unless_asked_for() -> None:
    assert make_telemetry(RouterSettings(), "router", "one") is None


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


def test_a_full_queue_drops_and_counts() -> None:
    kept = KeptSpans()
    kept.may_go_on.clear()
    tracing, counts = tracing_into(kept, max_queued=4)
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
@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("listens", [False, True])
def test_a_collector_that_does_not_answer_costs_one_line(
    scheme: str, listens: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there; and somebody who takes the connection and says nothing."""
    monkeypatch.setattr("pdserve.common.telemetry.span_export.EXPORT_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        settings = RouterSettings(otlp=f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
        telemetry = make_telemetry(settings, "router", "one")
        assert telemetry is not None
        began = time.monotonic()
        for _ in range(1000):
            telemetry.tracing.root("request", {}, 1, {}).end(2)
        assert time.monotonic() - began < 1000 * 0.2 / 10, "they waited for the collector"
        began = time.monotonic()
        telemetry.tracing.close()
        assert time.monotonic() - began < 2 * SHUTDOWN_TIMEOUT_S
    counts = telemetry.counts
    assert counts.exported == 0
    assert counts.failed + counts.dropped == 1000
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "cannot be exported" in warnings[0]


def test_a_collector_over_grpc_gets_the_resource() -> None:
    with otlp_receiver() as collector:
        settings = RouterSettings(otlp=collector.url, otel_resource_attributes="service.name=lost,team=a%20b")
        telemetry = make_telemetry(settings, "router", "one")
        assert telemetry is not None
        root = telemetry.tracing.root("request", CALLER, 1, {"x": 1})
        root.end(2)
        telemetry.tracing.close()
        (span,) = collector.wait_for(bool, "0af7651916cd43dd8448eb211c80319c")
        assert (span.name, span.service, span.attributes) == ("request", "lost", {"x": 1})
        assert telemetry.counts.exported == 1
