"""`MemoryReturn`: gives freed memory back to the system after a load has passed.

glibc has an arena per thread and keeps in it what lies between two blocks in use. gRPC's threads free what they have allocated for
each other, so that after a burst of calls hundreds of MiB may be free and resident, and the next burst may take another arena.
"""

from __future__ import annotations

import asyncio

from pdserve.common import clock
from pdserve.common.processes import allocator

LOOK_EVERY_S = 1.0
CHANGED_BYTES = 4 << 20
"""Memory from which a return is worth its time, some milliseconds of a thread without the interpreter's lock."""
_STEADY_BYTES = 1 << 20
_MOST_OF_TIME = 0.01
"""Part of the time in which looks may hold the allocator's locks: glibc walks over each free piece, half a million in 0.1 s."""


class MemoryReturn:
    """One per process; `run` it."""

    def __init__(self) -> None:
        self._last = self._least_resident = self._most_in_use = 0

    async def run(self) -> None:
        """Run until cancelled; ends at once with a C library other than glibc 2.33 or later."""
        if not allocator.is_known():
            return
        sizes, took_s = await asyncio.to_thread(_look)
        self.returned(*sizes)
        while True:
            await asyncio.sleep(max(LOOK_EVERY_S, took_s / _MOST_OF_TIME))
            sizes, took_s = await asyncio.to_thread(_look)
            if self.is_due(*sizes):
                await asyncio.to_thread(allocator.trim)
                sizes, took_s = await asyncio.to_thread(_look)
                self.returned(*sizes)

    def is_due(self, resident: int, in_use: int) -> bool:
        """True if memory that nobody uses has come about since the last return, and no more is taken now.

        resident: bytes of the process in RAM. in_use: bytes that are allocated.
        """
        is_steady = resident < self._last + _STEADY_BYTES
        self._last = resident
        self._least_resident = min(self._least_resident, resident)
        self._most_in_use = max(self._most_in_use, in_use)
        # a burst may be over before it is looked at, and what was in use at the last return may be free now
        changed = max(resident - self._least_resident, self._most_in_use - in_use)
        return is_steady and changed >= CHANGED_BYTES

    def returned(self, resident: int, in_use: int) -> None:
        """Note that free memory has been given back. The sizes are those after it."""
        self._last = self._least_resident = resident
        self._most_in_use = in_use


def _look() -> tuple[tuple[int, int], float]:
    """((bytes of the process in RAM, bytes that are allocated), seconds of this look)"""
    began = clock.monotonic()
    return (allocator.resident_bytes(), allocator.bytes_in_use()), clock.monotonic() - began
