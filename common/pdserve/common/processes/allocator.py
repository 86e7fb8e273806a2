"""glibc's allocator in this process: what is in use, and how free memory is given back. Other C libraries have none of it."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

LARGE_BYTES = 256 << 10
_M_MMAP_THRESHOLD = -3
"""malloc.h"""
_PAGE_BYTES = resource.getpagesize()
_LIBC = ctypes.CDLL(None)


class _Allocations(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


if hasattr(_LIBC, "mallinfo2"):
    _LIBC.mallinfo2.restype = _Allocations


def is_known() -> bool:
    """True with glibc 2.33 or later. `bytes_in_use`, `bytes_mapped` and `trim` are for that."""
    return hasattr(_LIBC, "mallinfo2") and hasattr(_LIBC, "malloc_trim")


def bytes_in_use() -> int:
    """Memory that is allocated in every arena and not freed, without blocks that are mapped one by one.

    Takes time with the number of free pieces: 0.1 s for half a million.
    """
    return int(_LIBC.mallinfo2().uordblks)


def bytes_mapped() -> int:
    """Memory of blocks that are mapped one by one."""
    return int(_LIBC.mallinfo2().hblkhd)


def trim() -> None:
    """Give back what is free in every arena; takes some milliseconds, without the interpreter's lock."""
    _LIBC.malloc_trim(0)


def return_large_blocks(large_bytes: int = LARGE_BYTES) -> None:
    """From now on, in this process, give blocks of `large_bytes` or more back as soon as they are free. Without glibc no effect.

    By default glibc raises its own threshold, up to 32 MiB, with the first large block that is freed, and keeps those after it: a
    process that has received a few large messages stays larger by as much.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, large_bytes)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
