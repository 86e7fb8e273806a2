"""`EventQueue`: what happens at which time, in the order of the times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from pdserve.simulator.virtual_time import VirtualTime


class EventQueue:
    """Calls of a simulation without an event loop. What is due at the same time runs in the order in which it was added."""

    def __init__(self) -> None:
        self.time = VirtualTime()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._events)

    @property
    def now_s(self) -> float:
        return self.time.now_s

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        """Call at that time, or next, if that has passed."""
        heapq.heappush(self._events, (when_s, next(self._numbers), call))

    def run(self) -> None:
        """Until nothing is left."""
        events = self._events
        while events:
            when_s, _, call = heapq.heappop(events)
            if (ahead_s := when_s - self.time.now_s) > 0:
                self.time.advance(ahead_s)
            call()
