"""How a child process ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdserve.common.ipc.child_process import exit_text, wait_for_exit
from tests.support.run.waiting import HANG_S


def started(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("raise SystemExit(3)", 3, "ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, "ended by signal 9"),
        ("import os; os.abort()", -6, "ended by signal 6"),
    ],
)
def test_an_exit_is_found_before_and_after_it_is_reaped(program: str, status: int, text: str) -> None:
    process = started(program)
    assert wait_for_exit(process, HANG_S) == status
    assert process.returncode is None, "it was reaped"
    assert process.wait(HANG_S) == status
    assert wait_for_exit(process, HANG_S) == status
    assert exit_text(status) == text


def test_a_process_that_goes_on_times_out() -> None:
    process = started("import time; time.sleep(1000)")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            wait_for_exit(process, 0.05)
    finally:
        process.kill()
        process.wait(HANG_S)
