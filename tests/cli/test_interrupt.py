"""Ctrl-C while modules are imported ends a command with status 130 and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(2 * HANG_S)]
INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--help"]),
        ("msgspec", ["top"]),
        ("httpx", ["top"]),
        ("grpc", ["chat", "Hello"]),
        ("uvloop", ["router"]),
        ("uvicorn", ["up", "--port", "0", "--grpc-port", "0"]),
        ("torch", ["decode"]),
    ],
)
@pytest.mark.parametrize("program", ["pdserve", "pdserve.cli.main"])
def test_ctrl_c_while_a_module_is_imported(tmp_path: Path, program: str, module: str, arguments: list[str]) -> None:
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    ended = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
