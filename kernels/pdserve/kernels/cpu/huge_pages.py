"""Huge pages for weights and KV cache on a CPU."""

from __future__ import annotations

import os

_TORCH_VARIABLE = "THP_MEM_ALLOC_ENABLE"


def request_huge_pages() -> None:
    """Let torch ask Linux for pages of 2 MiB for each tensor in main memory of at least that size.

    A decode step reads every weight once. With pages of 4 KiB, misses of the translation buffer take a fifth of that time
    (docs/performance.md). Torch reads the variable at the first tensor of a process, so this comes before; child processes inherit
    it. Without effect where the kernel has no transparent huge pages, and where the variable is set already.
    """
    os.environ.setdefault(_TORCH_VARIABLE, "1")
