"""`drop_mapped_pages`: returns the memory of a mapped file's tensor, so that loading does not hold each weight twice."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")
_LIBC = ctypes.CDLL(None, use_errno=True)


def drop_mapped_pages(tensor: Tensor) -> None:
    """Have the kernel forget the pages of the tensor's storage, if that is a mapped file, which is read again when needed.

    Without effect on other memory, and where the kernel does not list its mappings.
    """
    if tensor.device.type != "cpu":
        return
    storage = tensor.untyped_storage()
    start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = storage.data_ptr() + storage.nbytes()
    if storage.nbytes() and _is_mapped_file(start, end):
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_mapped_file(start: int, end: int) -> bool:
    """True if one mapping of a file has these addresses: anonymous memory would lose its content."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        # address range, rights, offset, device, inode, path
        addresses, rights, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= start < last:
            return end <= last and inode != "0" and rights.startswith("r")
    return False
