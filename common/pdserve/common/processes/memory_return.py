"""`MemoryReturn`: gives freed memory back to the system after a load has passed.

glibc has an arena per thread and keeps in it what lies between two blocks in use. gRPC's threads free what they have allocated for
each other, so that after a burst of calls hundreds of MiB may be free and resident, and the next burst may take another arena.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
from pathlib import Path

LOOK_EVERY_S = 1.0
CHANGED_BYTES = 4 << 20
"""Memory from which a return is worth its time, some milliseconds of a thread without the interpreter's lock."""
_PAGE_BYTES = resource.getpagesize()
_STEADY_BYTES = 1 << 20


class _Allocations(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


class MemoryReturn:
    """One per process; `run` it."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._trim = getattr(libc, "malloc_trim", None)
        self._mallinfo = getattr(libc, "mallinfo2", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Allocations
        self._last = self._least_resident = self._most_in_use = 0

    async def run(self) -> None:
        """Run until cancelled; ends at once with a C library other than glibc 2.33 or later."""
        if self._trim is None or self._mallinfo is None:
            return
        self.returned(*self._sizes())
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.is_due(*self._sizes()):
                await asyncio.to_thread(self._trim, 0)
                self.returned(*self._sizes())

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

    def _sizes(self) -> tuple[int, int]:
        return _resident_bytes(), int(self._mallinfo().uordblks) if self._mallinfo is not None else 0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
