"""`MemoryWatch`: the peak of this process' memory."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from types import TracebackType

_PAGE_BYTES = 4096
_M_MMAP_THRESHOLD = -3
"""malloc.h"""
_LIBC = ctypes.CDLL(None)
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def return_large_blocks() -> None:
    """Have the allocator give what is freed of 128 KiB or more back at once, from now on: what it keeps of them comes and goes
    by tens of MiB."""
    _LIBC.mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def settled_bytes() -> int:
    """The same, once everything that nobody uses is freed and the allocator has kept nothing of it."""
    gc.collect()
    _LIBC.malloc_trim(0)
    return resident_bytes()


def peak_bytes() -> int:
    """The largest memory of this process in RAM, for however short a moment, since the kernel last forgot it."""
    found = _PEAK.search(Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status has no VmHWM")
    return int(found[1]) * 1024


class MemoryWatch:
    """Inside the context the peak is counted from the memory at its beginning."""

    def __enter__(self) -> MemoryWatch:
        # what was freed before and the allocator has kept would take up the growth unseen
        self._began_bytes = settled_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        return self

    @property
    def grown_bytes(self) -> int:
        """The peak, beyond the memory at the beginning."""
        return peak_bytes() - self._began_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
