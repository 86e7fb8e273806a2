"""`MemoryWatch`: the peak of this process' memory. `TracedMemory`: that of Python's objects alone. `allocated_bytes`,
`in_use_bytes`: what is in use.

Memory in RAM is more than memory in use: each thread may allocate from an arena of its own, whose end glibc keeps when all of
it is free, `malloc_trim` or not. The number of such threads and the size of their arenas depend on everything that a test
process has run before: bounds near 100 MiB hold for memory in RAM only in a young process.
"""

from __future__ import annotations

import gc
import re
import sys
import tracemalloc
from pathlib import Path
from types import TracebackType

from pdserve.common.processes import allocator
from pdserve.common.processes.allocator import resident_bytes as resident_bytes

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def settled_bytes() -> int:
    """Memory of this process that is in RAM, once everything that nobody uses is freed and the allocator has kept nothing of it."""
    gc.collect()
    allocator.trim()
    return resident_bytes()


def allocated_bytes() -> int:
    """Memory that was allocated with malloc, in every arena and mapped blocks, and is not freed. Python's objects of more than
    512 bytes are among it."""
    gc.collect()
    return allocator.bytes_in_use() + allocator.bytes_mapped()


def in_use_bytes() -> int:
    """`allocated_bytes` and Python's smaller objects, each counted as 512 bytes: at least what is in use, without what allocators
    keep for the next request."""
    return allocated_bytes() + sys.getallocatedblocks() * 512


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


class TracedMemory:
    """Inside the context: bytes of Python's objects that were made there and are alive, in every thread. It makes them slower."""

    def __enter__(self) -> TracedMemory:
        tracemalloc.start()
        return self

    @property
    def bytes(self) -> int:
        """The sum now."""
        return tracemalloc.get_traced_memory()[0]

    @property
    def peak_bytes(self) -> int:
        """The largest sum at any moment."""
        return tracemalloc.get_traced_memory()[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tracemalloc.stop()
