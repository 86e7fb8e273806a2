"""From settings to a process's `Tracing`: which collector, which protocol, whose name. No OpenTelemetry unless asked for.

| `otlp`                               | protocol  | exports to                            |
|--------------------------------------|-----------|---------------------------------------|
| `grpc://host:port`                   | gRPC      | host:port, plain text                 |
| `grpcs://host:port`                  | gRPC      | host:port, TLS                        |
| `http(s)://host:port`                | HTTP      | `/v1/traces` there                    |
| `http(s)://host:port/path`           | HTTP      | `/path/v1/traces`, not doubled        |
| `http(s)://...`, `otlp_protocol` grpc | gRPC     | host:port, TLS with https             |
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from pdserve.common.address.host_address import masked_url
from pdserve.common.errors import ConfigError
from pdserve.common.settings.service_settings import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from pdserve.common.telemetry.metrics import ExportCounts
    from pdserve.common.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"
_SCHEMES = ("grpc", "grpcs", "http", "https")
_WANTED = "grpc://host:port or http://host:port is needed"


class OtlpEndpoint(NamedTuple):
    """The collector of spans."""

    protocol: str
    """`grpc` or `http/protobuf`."""
    target: str
    """host:port for gRPC, a URL for HTTP, which may hold a user and a password."""
    secure: bool

    def __str__(self) -> str:
        """The target for logs, without user and password."""
        return masked_url(self.target) if self.protocol == "http/protobuf" else self.target


class Telemetry(NamedTuple):
    """A process's tracing, and the outcomes of its spans."""

    tracing: Tracing
    counts: ExportCounts


def make_telemetry(settings: ServiceSettings, service: str, instance: str) -> Telemetry | None:
    """None when no collector is named or the SDK is disabled. service: `router`, `prefill` or `decode`.

    Returns at once, whether the collector answers or not. Raises: ConfigError.
    """
    if settings.otlp is None or settings.otel_sdk_disabled:
        return None
    from pdserve.common.telemetry.span_export import SpanExport
    from pdserve.common.telemetry.tracing import Tracing, make_sampler

    endpoint = parse_endpoint(settings.otlp, settings.otlp_protocol, is_traces_url=settings.otlp_is_traces_url)
    resource = {
        "service.name": f"pdserve-{service}",
        "service.namespace": "pdserve",
        "service.version": version("pdserve"),
        "service.instance.id": instance,
        **parse_pairs("otel_resource_attributes", settings.otel_resource_attributes),
    }
    if settings.otel_service_name:
        resource["service.name"] = settings.otel_service_name
    # they repeat with each batch what `SpanExport` logs once
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    export = SpanExport(
        _exporter(endpoint, parse_pairs("otlp_headers", settings.otlp_headers)),
        str(endpoint),
        every_s=settings.otel_bsp_schedule_delay_ms / 1e3,
    )
    sampler = make_sampler(settings.otel_traces_sampler, settings.otel_traces_sampler_arg)
    log.info("spans go to %s over %s", endpoint, endpoint.protocol)
    return Telemetry(Tracing(resource, sampler, export), export.counts)


def parse_endpoint(url: str, protocol: str | None, *, is_traces_url: bool = False) -> OtlpEndpoint:
    """The endpoint in `otlp`; see the table above. is_traces_url: add no path to the URL.

    Raises: ConfigError. The message repeats no part of the URL, which may contain an unescaped password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"otlp has no valid host and port: {_WANTED}") from None
    if parts.scheme not in _SCHEMES or not host:
        raise ConfigError(f"otlp has no host, or another scheme than {', '.join(_SCHEMES)}: {_WANTED}")
    secure = parts.scheme in ("grpcs", "https")
    if parts.scheme.startswith("grpc") and protocol == "http/protobuf":
        raise ConfigError(f"otlp begins with {parts.scheme}://, but otlp_protocol is {protocol!r}")
    if parts.scheme.startswith("grpc") or protocol == "grpc":
        if parts.path.strip("/"):
            raise ConfigError("otlp has a path, and gRPC takes none: grpc://host:port is needed")
        named = f"[{host}]" if ":" in host else host
        return OtlpEndpoint("grpc", f"{named}:{port or 4317}", secure)
    path = parts.path.rstrip("/")
    path = path if path.endswith(_TRACES_PATH) else path + _TRACES_PATH
    target = url if is_traces_url else parts._replace(path=path).geturl()
    return OtlpEndpoint("http/protobuf", target, secure)


def parse_pairs(field: str, text: str) -> dict[str, str]:
    """`name=value,name=value`, values percent-encoded. Raises: ConfigError naming the pair's place, not its value."""
    pairs = {}
    for place, pair in enumerate(filter(None, map(str.strip, text.split(",")))):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{field}: entry {place} is not name=value")
        pairs[name.strip()] = unquote(value.strip())
    return pairs


def _exporter(endpoint: OtlpEndpoint, headers: dict[str, str]) -> SpanExporter:
    from pdserve.common.telemetry.span_export import EXPORT_TIMEOUT_S

    if endpoint.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        # lower case: gRPC refuses other metadata keys
        metadata = {name.lower(): value for name, value in headers.items()}
        return GrpcExporter(
            endpoint=endpoint.target, insecure=not endpoint.secure, headers=metadata, timeout=EXPORT_TIMEOUT_S
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint.target, headers=headers, timeout=EXPORT_TIMEOUT_S)
