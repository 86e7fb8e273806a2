"""Nothing that a run of tests has started outlives the run, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.run.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
HANGING = """
import os, subprocess, time

def test_fails():
    assert False, "what failed"

def test_hangs():
    inner = subprocess.Popen(["sleep", "600"], start_new_session=True)
    shell = subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"], start_new_session=True)
    with open({path!r}, "w") as file:
        file.write(f"{{inner.pid}} {{shell.pid}} ")
        file.flush()
    time.sleep(600)
"""


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.process
@pytest.mark.timeout(4 * HANG_S)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["one", "xdist"])
def test_nothing_outlives_a_run(tmp_path: Path, number: signal.Signals, options: list[str]) -> None:
    started = tmp_path / "started"
    (tmp_path / "test_hanging.py").write_text(HANGING.format(path=str(started)))
    plugin = [
        "-p",
        "tests.support.run.run_reaper",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-ra", *plugin, *options, str(tmp_path / "test_hanging.py")],
            cwd=ROOT, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(lambda: started.exists() and started.read_text().endswith(" "), log.read_text)
        pids = [int(word) for word in started.read_text().split()]
        assert all(map(psutil.pid_exists, pids))
        run.send_signal(number)
        run.wait(HANG_S)
        wait_until(lambda: not any(map(is_alive, pids)), lambda: f"{pids} have ended: {log.read_text()}")
        if number != signal.SIGKILL:
            text = log.read_text()
            assert ("::test_fails" in text, "what failed" in text, "1 failed" in text) == (True, True, True), text
    finally:
        run.kill()
        run.wait()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
