"""Repeat a measurement beside which other processes of the machine used the processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

Result = TypeVar("Result")
MAX_SHARE = 0.04
"""CPU time of others, of the time of all cores, up to which a measurement counts."""
MAX_REPEATS = 20


def quiet(measure: Callable[[], Result]) -> Result:
    """Result of the first call beside which other processes used at most 4 % of the machine.

    This process and its descendants are not others. Raises TimeoutError after 20 calls.
    """
    for _ in range(MAX_REPEATS):
        began, before = time.perf_counter(), _others_s()
        result = measure()
        share = (_others_s() - before) / (time.perf_counter() - began) / (os.cpu_count() or 1)
        if share <= MAX_SHARE:
            return result
        print(f"  repeated: other processes used {share:.0%} of the machine", flush=True)
    raise TimeoutError(
        f"other processes used more than {MAX_SHARE:.0%} of the machine during {MAX_REPEATS} measurements"
    )


def _others_s() -> float:
    """CPU seconds of all processes since the machine started, but for this one and its descendants that live."""
    times = psutil.cpu_times()
    own = psutil.Process()
    mine = sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))
    return times.user + times.nice + times.system - mine
