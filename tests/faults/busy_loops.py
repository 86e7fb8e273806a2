"""Processes that keep every core busy, each for a bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAM = """
import sys, time
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    pass
"""


@contextmanager
def busy_loops(per_core: int, at_most_s: float) -> Iterator[None]:
    """`per_core` busy loops for each core; they end with the block, or after `at_most_s` seconds."""
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(at_most_s)]
    loops = [subprocess.Popen(command) for _ in range(per_core * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()
