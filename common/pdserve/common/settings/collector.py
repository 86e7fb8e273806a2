"""`read_collector`: the collector of spans that OpenTelemetry's own variables name.

| `OTEL_EXPORTER_OTLP_PROTOCOL` | exports to |
|---|---|
| `http/protobuf`, the default | `/v1/traces` below the endpoint |
| `grpc` | host:port of the endpoint, TLS with https |

The SDK reads these variables and the others (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_...`) by itself; this module
knows only what decides whether there is tracing, and whether spans would leave this machine unencrypted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from pdserve.common.address.host_address import masked_url
from pdserve.common.errors import ConfigError
from pdserve.common.security.deployment_key import is_loopback

_PREFIX = "OTEL_EXPORTER_OTLP_"
_PROTOCOLS = ("http/protobuf", "grpc")


class Collector(NamedTuple):
    """An endpoint, and the protocol of spans to it."""

    variable: str
    """The variable that names the endpoint."""
    url: str
    """May hold a user and a password; `str` of the collector does not."""
    protocol: str
    """One of `_PROTOCOLS`."""

    def __str__(self) -> str:
        return f"{masked_url(self.url)} over {self.protocol}"

    def verify(self, *, insecure: bool) -> None:
        """Raises: ConfigError for a URL or protocol that cannot be used, and, unless `insecure`, for a host beyond loopback without
        TLS. The message repeats no part of the URL but its host: it may contain a password."""
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ConfigError(f"{self.variable} has no valid host and port: http://host:port is needed") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(
                f"{self.variable} has no host, or another scheme than http, https: http://host:port is needed"
            )
        if self.protocol not in _PROTOCOLS:
            raise ConfigError(f"{_PREFIX}PROTOCOL is {self.protocol[:100]!r}, one of {', '.join(_PROTOCOLS)} is needed")
        if parts.scheme == "http" and not insecure and not is_loopback(host):
            raise ConfigError(
                f"{self.variable} names {host}, which is not loopback, without TLS: https:// is needed, or --insecure"
            )


def read_collector(environ: Mapping[str, str]) -> Collector | None:
    """The collector; None if no variable names one, or the SDK is disabled. Variables of traces alone precede the general ones."""
    # set but empty means unset, and any word but "true" means false: OpenTelemetry's rules
    given = {name: text for name, value in environ.items() if name.startswith("OTEL_") and (text := value.strip())}
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocols = (given.get(f"{_PREFIX}{name}PROTOCOL") for name in ("TRACES_", ""))
    for variable in (f"{_PREFIX}TRACES_ENDPOINT", f"{_PREFIX}ENDPOINT"):
        if (url := given.get(variable)) is not None:
            return Collector(variable, url, next(filter(None, protocols), _PROTOCOLS[0]))
    return None
