"""Connections of a service beyond loopback use TLS, or the operator has said `--insecure`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from tests.support.processes.tls_authority import Authority

KINDS = pytest.mark.parametrize("kind", [RouterSettings, PrefillSettings, DecodeSettings])


ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def load(kind: type[ServiceSettings], environ: Mapping[str, str] | None = None, **flags: Any) -> ServiceSettings:
    return load_settings(kind, flags=flags, environ=environ or {})


@pytest.mark.parametrize("setting", ["prefill", "decode"])
@pytest.mark.parametrize("address", ["10.0.0.1:7001", "decode-1.example:7002", "[fd00::7]:7003"])
def test_a_router_sends_no_prompt_in_the_clear_to_another_machine(
    setting: str, address: str, authority: Authority
) -> None:
    addresses: dict[str, Any] = {setting: ["127.0.0.1:7000", address]}
    with pytest.raises(ConfigError) as caught:
        load(RouterSettings, **addresses)
    for part in (f"{setting} names {address}", "tls_cert_file", "--insecure"):
        assert part in caught.value.message
    load(RouterSettings, **addresses, insecure=True)
    load(RouterSettings, **addresses, **authority.issue().settings())


@KINDS
@pytest.mark.parametrize(
    ("name", "clear"),
    [
        ("PDSERVE_REDIS", "redis://user:hunter2@10.0.0.9:6379"),
        (ENDPOINT, "http://user:hunter2@10.0.0.9:4318"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://10.0.0.9:4318/traces"),
    ],
)
def test_redis_and_collectors_beyond_loopback(
    kind: type[ServiceSettings], name: str, clear: str, authority: Authority
) -> None:
    told = name.lower().removeprefix("pdserve_") if name.startswith("PDSERVE_") else name
    for more in ({}, authority.issue().settings()):  # the services' own TLS is not that of others
        with pytest.raises(ConfigError, match=f"{told} names 10.0.0.9, .*--insecure") as caught:
            load(kind, {name: clear}, **more)
        assert "hunter2" not in caught.value.message
    load(kind, {name: clear}, insecure=True)
    load(kind, {name: clear.replace("http:", "https:").replace("redis:", "rediss:")})
    load(kind, {name: clear.replace("10.0.0.9", "127.0.0.1")})


def test_a_collector_that_gets_nothing_needs_no_tls() -> None:
    load(DecodeSettings, {ENDPOINT: "http://10.0.0.9:4317", "OTEL_SDK_DISABLED": "true"})
