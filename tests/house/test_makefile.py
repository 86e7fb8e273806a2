"""Targets of the Makefile that no other test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_benchmark_finds_what_lies_beside_it(tmp_path: Path) -> None:
    make = ["make", "-n", "--no-print-directory", "bench"]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = said.splitlines()[-1]
    (tmp_path / "beside.py").touch()
    (tmp_path / "benchmark.py").write_text("import beside")
    assert ".venv/bin/python benchmarks/serving.py" in command
    command = command.replace(".venv/bin/python", sys.executable)
    command = command.replace("benchmarks/serving.py", str(tmp_path / "benchmark.py"))
    # as the Makefile exports it
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PYTHONSAFEPATH": "1"})
