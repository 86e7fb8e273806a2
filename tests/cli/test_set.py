"""`--set name=value` reaches every service, also where the setting has a flag of its own."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from pdserve.common.errors import ConfigError

STARTS_NOT = ["--set", "drain_s=-1"]
"""Refused last of all: what the test sets is named unless it got lost."""


@pytest.mark.parametrize("command", ["router", "prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("host", "0.0.0.0"), ("port", "x"), ("redis", "x"), ("insecure", "x"), ("otel_bsp_schedule_delay_ms", "0")],
)
def test_a_wrong_value_is_refused(command: str, name: str, wrong: str) -> None:
    refused = CliRunner().invoke(app, [command, "--set", f"{name}={wrong}", *STARTS_NOT]).exception
    assert isinstance(refused, ConfigError)
    assert name in str(refused)


@pytest.mark.parametrize("command", ["router", "prefill", "decode"])
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--set", "deployment_key=s3cr3t of many characters"], "deployment_key"),
        (["--set", "otlp_headers=a=s3cr3t"], "otlp_headers"),
        (["--redis", "redis://:s3cr3t@host"], "redis"),
        (["--otlp", "http://user:s3cr3t@host:1"], "otlp"),
    ],
)
def test_a_secret_in_the_command_line_is_told_and_not_repeated(command: str, flags: list[str], name: str) -> None:
    result = CliRunner().invoke(app, [command, *flags, *STARTS_NOT])
    assert f"pdserve: {name} is in the command line" in result.output
    assert f"PDSERVE_{name.upper()}" in result.output
    assert "s3cr3t" not in result.output + str(result.exception)


def test_nothing_is_said_of_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["router", "--redis", "redis://host", "--otlp", "http://host:1", *STARTS_NOT])
    assert "is in the command line" not in result.output
    malformed = CliRunner().invoke(app, ["router", "--set", "deployment_key s3cr3t"])
    assert "s3cr3t" not in malformed.output + str(malformed.exception)


@pytest.mark.parametrize("name", ["local_prefill", "policy"])
def test_a_wrong_value_is_refused_by_the_router(name: str) -> None:
    refused = CliRunner().invoke(app, ["router", "--set", f"{name}=x", *STARTS_NOT]).exception
    assert isinstance(refused, ConfigError)
    assert name in str(refused)


def test_a_flag_of_its_own_counts_more() -> None:
    refused = CliRunner().invoke(app, ["router", "--policy", "x", "--set", "policy=y", *STARTS_NOT]).exception
    assert isinstance(refused, ConfigError)
    assert "'x'" in str(refused)
