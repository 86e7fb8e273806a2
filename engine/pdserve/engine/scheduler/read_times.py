"""`ReadTimes`: how long reads of the store take, from recent ones."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common import clock

KEEP = 0.8
"""Factor of the weights of earlier reads."""
FRESH_S = 30.0
"""Seconds after which the store may have become faster: it is tried again."""
FIRST_LIMIT_S = 2.0
MIN_LIMIT_S = 0.25
"""Seconds for which a sequence waits at least: other threads of the process may have the CPU."""


@dataclass(slots=True)
class ReadTimes:
    """Decaying sums over loads."""

    num_blocks: float = 0.0
    seconds: float = 0.0
    last_at: float = 0.0

    def add(self, num_blocks: int, seconds: float) -> None:
        """seconds: from the step that began the load to its end."""
        self.num_blocks = KEEP * self.num_blocks + num_blocks
        self.seconds = KEEP * self.seconds + seconds
        self.last_at = clock.monotonic()

    def expected(self, num_blocks: int) -> float | None:
        """Seconds that a load of so many blocks takes; None if nothing is known about that, or not lately."""
        if not self.num_blocks or clock.monotonic() - self.last_at > FRESH_S:
            return None
        return num_blocks * self.seconds / self.num_blocks

    def limit_s(self, num_blocks: int) -> float:
        """Seconds that a sequence waits for them at most: twice what is expected."""
        expected = self.expected(num_blocks)
        return FIRST_LIMIT_S if expected is None else max(MIN_LIMIT_S, 2.0 * expected)
