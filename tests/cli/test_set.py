"""`--set name=value` reaches every service, also where the setting has a flag of its own."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pdserve.cli.main import app
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


@pytest.mark.parametrize("name", ["local_prefill", "policy"])
def test_a_wrong_value_is_refused_by_the_router(name: str) -> None:
    refused = CliRunner().invoke(app, ["router", "--set", f"{name}=x", *STARTS_NOT]).exception
    assert isinstance(refused, ConfigError)
    assert name in str(refused)


def test_a_flag_of_its_own_counts_more() -> None:
    refused = CliRunner().invoke(app, ["router", "--policy", "x", "--set", "policy=y", *STARTS_NOT]).exception
    assert isinstance(refused, ConfigError)
    assert "'x'" in str(refused)
