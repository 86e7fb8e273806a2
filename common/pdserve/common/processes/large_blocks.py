"""`return_large_blocks`: have the allocator give large blocks back to the system as soon as they are free."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
"""malloc.h"""
LARGE_BYTES = 256 << 10


def return_large_blocks() -> None:
    """From now on, in this process, for blocks of `LARGE_BYTES` or more. Without glibc it does nothing.

    By default glibc raises its own threshold, up to 32 MiB, with the first large block that is freed, and keeps those after it: a
    process that has received a few large messages stays larger by as much.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
