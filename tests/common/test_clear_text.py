"""Connections of a service beyond loopback use TLS, or the operator has said `--insecure`."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from tests.support.tls_authority import Authority

KINDS = pytest.mark.parametrize("kind", [RouterSettings, PrefillSettings, DecodeSettings])


def load(kind: type[ServiceSettings], **flags: Any) -> ServiceSettings:
    return load_settings(kind, flags=flags, environ={})


@pytest.mark.parametrize("setting", ["prefill", "decode"])
@pytest.mark.parametrize("address", ["10.0.0.1:7001", "decode-1.example:7002", "[fd00::7]:7003"])
def test_a_router_sends_no_prompt_in_the_clear_to_another_machine(
    setting: str, address: str, authority: Authority
) -> None:
    addresses = {setting: ["127.0.0.1:7000", address]}
    with pytest.raises(ConfigError) as caught:
        load(RouterSettings, **addresses)
    for part in (f"{setting} names {address}", "tls_cert_file", "--insecure"):
        assert part in caught.value.message
    load(RouterSettings, **addresses, insecure=True)
    load(RouterSettings, **addresses, **authority.issue().settings())


@KINDS
@pytest.mark.parametrize(
    ("setting", "clear", "encrypted"),
    [
        ("redis", "redis://user:hunter2@10.0.0.9:6379", "rediss://user:hunter2@10.0.0.9:6379"),
        ("otlp", "grpc://10.0.0.9:4317", "https://10.0.0.9:4318"),
        ("otlp", "http://user:hunter2@10.0.0.9:4318", "https://user:hunter2@10.0.0.9:4318"),
    ],
)
def test_redis_and_collectors_beyond_loopback(
    kind: type[ServiceSettings], setting: str, clear: str, encrypted: str, authority: Authority
) -> None:
    for more in ({}, authority.issue().settings()):  # the services' own TLS is not that of others
        with pytest.raises(ConfigError, match=f"{setting} names 10.0.0.9, .*--insecure") as caught:
            load(kind, **{setting: clear}, **more)
        assert "hunter2" not in caught.value.message
    load(kind, **{setting: clear}, insecure=True)
    load(kind, **{setting: encrypted})
    load(kind, **{setting: clear.replace("10.0.0.9", "127.0.0.1")})


def test_a_collector_that_gets_nothing_needs_no_tls() -> None:
    load(DecodeSettings, otlp="grpc://10.0.0.9:4317", otel_sdk_disabled=True)
