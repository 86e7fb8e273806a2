"""The clock of this process. A simulation puts a virtual one in the place of the machine's, and nothing else reads another.

Timers of asyncio follow the event loop, whose time a simulation sets as well. CPU time, which is measured, is not read here.
"""

from __future__ import annotations

import contextlib
import time as _machine
from collections.abc import Iterator
from typing import Protocol, cast


class Clock(Protocol):
    """What the module `time` has."""

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary moment on."""

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""

    def time(self) -> float:
        """Seconds since 1970."""

    def time_ns(self) -> int:
        """The same in nanoseconds."""


_clock: Clock = cast(Clock, _machine)


def monotonic() -> float:
    """Seconds that never go back, from an arbitrary moment on."""
    return _clock.monotonic()


def monotonic_ns() -> int:
    """The same in nanoseconds."""
    return _clock.monotonic_ns()


def unix_s() -> float:
    """Seconds since 1970."""
    return _clock.time()


def unix_ns() -> int:
    """The same in nanoseconds."""
    return _clock.time_ns()


@contextlib.contextmanager
def used(clock: Clock) -> Iterator[None]:
    """Read this clock until the block ends."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
