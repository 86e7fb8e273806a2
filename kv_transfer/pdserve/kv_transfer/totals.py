"""`Totals`: what threads have counted since start, by name."""

from __future__ import annotations

import threading
from collections import Counter


class Totals:
    """Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def __getitem__(self, name: str) -> int:
        """0 for a name that nothing was counted under."""
        return self._counts[name]
