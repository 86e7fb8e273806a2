"""A worker whose engine does not come back ends, and says where it was."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest

from pdserve.worker.engine_watchdog import EngineWatchdog
from tests.support.run.waiting import HANG_S

HANGS = """
import ctypes, sys, threading, time
from pdserve.common.processes.stacks import dump_stacks
from pdserve.worker.engine_watchdog import EngineWatchdog

def hang_with_the_interpreters_lock():
    ctypes.PyDLL(None).sleep(86400)

def hang_without_it():
    time.sleep(86400)

EngineWatchdog(lambda: 7, 1.0, dump_stacks).start()
thread = threading.Thread(target=globals()[sys.argv[1]], daemon=True)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("hang", ["hang_with_the_interpreters_lock", "hang_without_it"])
def test_a_hang_ends_the_process_with_all_stacks(hang: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, hang], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ended.returncode == 1
    assert f"in {hang}" in ended.stderr
    if hang == "hang_without_it":
        assert "the engine has made no progress for 1 s (engine_stuck_exit_s)" in ended.stderr


def test_an_engine_that_moves_is_left_alone() -> None:
    ticks, statuses, looked = itertools.count(), list[int](), threading.Event()

    def tick() -> int:
        number = next(ticks)
        if number == 20:
            looked.set()
        return number

    watchdog = EngineWatchdog(tick, 0.05, lambda: None, statuses.append)
    watchdog.start()
    assert looked.wait(HANG_S)
    watchdog.stop()
    watchdog.stop()
    assert not statuses


def test_one_that_stops_moving_is_not() -> None:
    ended: list[int] = []
    over = threading.Event()

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    watchdog = EngineWatchdog(lambda: 3, 0.2, lambda: None, end)
    watchdog.start()
    assert over.wait(HANG_S)
    watchdog.stop()
    assert ended == [1]


def test_one_that_was_never_started_can_be_stopped() -> None:
    EngineWatchdog(lambda: 0, 1.0, lambda: None).stop()
