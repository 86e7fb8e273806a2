"""`Heartbeat`: a counter of the engine's progress, for other threads."""

from __future__ import annotations

import time


class Heartbeat:
    """Advances at each turn of the engine's loop and before each call that computes layers: progress within a step is visible.

    One thread beats; any thread may read.
    """

    def __init__(self) -> None:
        self.tick = 0
        self.ticked_at = time.monotonic()
        """When it last advanced, `time.monotonic()` seconds."""

    def beat(self) -> None:
        self.tick += 1
        self.ticked_at = time.monotonic()
