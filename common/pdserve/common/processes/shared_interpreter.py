"""One interpreter for an engine's thread and the threads that read messages and blocks meanwhile."""

from __future__ import annotations

import sys

SWITCH_INTERVAL_S = 0.0005
"""Seconds after which another thread gets the interpreter from the engine's; Python's default of 5 ms is a step's length."""


def share_interpreter() -> None:
    """Shorten this process's switch interval to `SWITCH_INTERVAL_S`."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
