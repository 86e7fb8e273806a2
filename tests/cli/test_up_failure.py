"""`pdserve up` with a model that no worker can load: the cause, once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.cli.service_commands import ReportedFailure, serve_worker
from pdserve.cli.up.child_report import MAX_MESSAGE_CHARS, FailedReport, ReportPipe, read_report
from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import PrefillSettings
from tests.support.models.checkpoints import edit_json
from tests.support.run.waiting import HANG_S


@pytest.fixture
def broken(tiny_checkpoints: Callable[..., Path]) -> Path:
    folder = tiny_checkpoints("llama", seed=91)
    edit_json(folder / "config.json", residual_multiplier=0.22)
    return folder


@pytest.fixture(autouse=True)
def _logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service takes over the logging of its process, which here is that of the tests."""
    monkeypatch.setattr("pdserve.cli.service_commands.configure_logging", lambda *given: None)


@pytest.mark.process
@pytest.mark.timeout(3 * HANG_S)
def test_the_cause_is_printed_once(broken: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pdserve.cli.main",
        "up",
        "--model",
        str(broken),
        "--port",
        "0",
        "--grpc-port",
        "0",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 2, told
    assert told.count("residual_multiplier is 0.22") == 1, told
    assert "pdserve: prefill-0: " in told or "pdserve: decode-0: " in told
    assert "before it was ready" not in told


def test_a_service_with_a_parent_sends_the_cause(broken: Path) -> None:
    read, write = os.pipe()
    with pytest.raises(ReportedFailure):
        serve_worker(PrefillSettings, {"model": str(broken)}, None, write, None)
    os.close(write)
    with os.fdopen(read, "rb") as reports:
        report = read_report(reports.readline())
    assert isinstance(report, FailedReport)
    assert report.message.endswith("it must be 1 or absent")


def test_a_service_alone_raises_it(broken: Path) -> None:
    with pytest.raises(ConfigError, match="residual_multiplier is 0"):
        serve_worker(PrefillSettings, {"model": str(broken)}, None, None, None)


def test_a_report_is_one_short_line() -> None:
    read, write = os.pipe()
    ReportPipe(write).send(FailedReport("\n\u2028" * (MAX_MESSAGE_CHARS // 2)))
    os.close(write)
    with os.fdopen(read, "rb") as reports:
        [line] = reports.read().splitlines()
    assert len(line) < 1 << 16
