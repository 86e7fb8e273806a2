"""`python -m gpu` as `make gpu` and `make gpu-dry` call it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from gpu.plan import STAGES
from gpu.rows import is_timed, read_rows
from tests.support.run.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
MAY_BE_SKIPPED = {"graphs", "nixl_copies"}
"""Stages that this checkout or this machine may lack something for; the row gives the reason."""


def environment() -> dict[str, str]:
    """That of a test under xdist, always: `make test-all` runs these there, and a stage runs pytest itself."""
    return dict(os.environ) | {"PYTHONPATH": str(ROOT / "benchmarks"), "PYTEST_XDIST_WORKER": "gw0"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: this would be the whole measurement")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("make gpu needs a GPU: torch ")
    assert "finds no CUDA device" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(3600)
def test_a_dry_run_runs_every_stage_and_measures_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=3500, check=False)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text()[-4000:]
    assert all(row["dry"] for row in rows)
    for stage in STAGES:
        own = [row for row in rows if row["stage"] == stage.name and "took_s" not in row]
        assert own, stage.name
        assert stage.name in MAY_BE_SKIPPED or not [row for row in own if "skipped" in row]
    timed = [(row["case"], name) for row in rows for name in row if is_timed(name) and row[name] is not None]
    assert not timed
    assert not [row for row in rows if row.get("met") is not None], "a goal was judged without a measurement"
    assert any(is_timed(name) for row in rows for name in row)
    text = (tmp_path / "table.txt").read_text()
    assert text.startswith("DRY RUN")
    assert done.stdout.rstrip().endswith(text.rstrip())


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_contract_has_rows_under_xdist(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-m", "gpu", "--dry", "--only", "kernel_contract", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)
    rows = [row for row in read_rows(tmp_path / "rows.jsonl") if "took_s" not in row]
    assert [row["case"] for row in rows] == ["kernels/triton/test_triton_layer_ops.py"], done.stdout
    assert rows[0]["ok"]
    assert rows[0]["passed"] > 10


@pytest.mark.slow
@pytest.mark.process
def test_sigterm_ends_every_process_and_prints_the_table(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gpu",
        "--dry",
        "--only",
        "environment",
        "--only",
        "serving",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        # the command, its stage, and the cluster's processes
        wait_until(lambda: len(parent.children(recursive=True)) > 2)
        started = parent.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "DRY RUN" in printed
    assert "serving: not begun" in printed
    wait_until(lambda: not [child for child in started if child.is_running()])


@pytest.mark.slow
@pytest.mark.process
def test_a_stage_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu", "--dry", "--only", "serving", "--seconds", "3", "--out", str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        # a stage that goes on would look at the clock itself
        parent = psutil.Process(process.pid)
        wait_until(parent.children)
        parent.children()[0].suspend()
        printed, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "serving, limit: ended after 3 s" in printed
