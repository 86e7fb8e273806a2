"""`LoopLag`: measures the delay of the event loop's timers, as a metric and, if it is long, as a warning."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry, Histogram

log = logging.getLogger(__name__)

LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
LOOK_EVERY_S = 0.1
WARN_ABOVE_S = 0.25
WARN_EVERY_S = 10.0
"""Between two warnings; each names the longest lag since the one before."""


class LoopLag:
    """One per process; `run` it in the loop that is to be watched."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "pdserve_event_loop_lag_seconds",
            "Delay of the event loop at a timer, every 0.1 s.",
            buckets=LAG_BUCKETS_S,
            registry=registry,
        )
        self._longest_s = 0.0
        self._warned_at: float | None = None

    async def run(self) -> None:
        """Run until cancelled. A blocked loop is detected when it continues."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            now = loop.time()
            self.observe(max(0.0, now - due), now)

    def observe(self, lag_s: float, now: float) -> None:
        """A timer was served so late. now: a monotonic clock, seconds."""
        self._seconds.observe(lag_s)
        self._longest_s = max(self._longest_s, lag_s)
        if self._longest_s < WARN_ABOVE_S or (self._warned_at is not None and now - self._warned_at < WARN_EVERY_S):
            return
        log.warning(
            "the event loop was blocked for %.2f s: a callback took so long, or the process was not run",
            self._longest_s,
        )
        self._longest_s, self._warned_at = 0.0, now
