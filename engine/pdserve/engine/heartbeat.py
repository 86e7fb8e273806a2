"""`Heartbeat`: a counter of the engine's progress, for other threads."""

from __future__ import annotations

from pdserve.common import clock


class Heartbeat:
    """Advances at each turn of the engine's loop and before each call that computes layers: progress within a step is visible.

    One thread beats; any thread may read.
    """

    def __init__(self) -> None:
        self.tick = 0
        self.ticked_at = clock.monotonic()
        """When it last advanced, `clock.monotonic()` seconds."""

    def beat(self) -> None:
        self.tick += 1
        self.ticked_at = clock.monotonic()
