"""Huge pages: torch asks for them in a process that does so before its first tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ALLOCATE = """
from pdserve.kernels.cpu.huge_pages import request_huge_pages
request_huge_pages()
import torch
large = torch.ones(64 << 20, dtype=torch.uint8)
[line] = [line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
print(line.split()[1])
"""


@pytest.mark.skipif(
    not _ENABLED.is_file() or "[never]" in _ENABLED.read_text(), reason="this kernel has no transparent huge pages"
)
def test_a_large_tensor_has_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", _ALLOCATE], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) >= 32 << 10, "KiB of huge pages"
