"""`SegmentFolder`: the files of a `DiskStore`, in which all of its input and output is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Buffers = Sequence[bytearray | memoryview]
_SUFFIX = ".kv"
_INDEX_SUFFIX = ".index"


class SegmentFile(Protocol):
    """A file of bytes, which can be read as long as somebody has this object, also after it was removed."""

    @property
    def size(self) -> int: ...

    def write(self, header: bytes | bytearray, data: memoryview, offset: int) -> int:
        """Write both, one after the other; returns the number of bytes that were written. Raises: OSError."""

    def read(self, into: Buffers, offset: int) -> int:
        """Fill the buffers, one after the other; returns the number of bytes that were there. Raises: OSError."""


class SegmentFolder(Protocol):
    """Files by number, each with a small one for its index."""

    def open_all(self) -> dict[int, SegmentFile]:
        """What is there from before, in the order of the numbers. Raises: OSError."""

    def create(self, number: int) -> SegmentFile:
        """A file without bytes. Raises: OSError."""

    def remove(self, number: int) -> None:
        """Remove a file with its index. Raises: OSError."""

    def write_index(self, number: int, data: bytes) -> None:
        """Raises: OSError."""

    def read_index(self, number: int) -> bytes | None:
        """None if it cannot be read."""


class DiskFile:
    """Implements `SegmentFile`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        # a read that goes on keeps this object, and so the file
        os.close(self._descriptor)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def write(self, header: bytes | bytearray, data: memoryview, offset: int) -> int:
        return os.pwritev(self._descriptor, [header, data], offset)

    def read(self, into: Buffers, offset: int) -> int:
        return os.preadv(self._descriptor, into, offset)


class DiskFolder:
    """Implements `SegmentFolder`."""

    def __init__(self, path: Path) -> None:
        """path: made if need be. Raises: OSError."""
        self._path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __str__(self) -> str:
        return str(self._path)

    def open_all(self) -> dict[int, SegmentFile]:
        numbers: list[int] = []
        for path in self._path.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(ValueError):
                if path == self._file(number := int(path.stem)):
                    numbers.append(number)
        return {number: self._open(number, os.O_RDWR) for number in sorted(numbers)}

    def create(self, number: int) -> DiskFile:
        return self._open(number, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def _open(self, number: int, flags: int) -> DiskFile:
        return DiskFile(os.open(self._file(number), flags | os.O_CLOEXEC, 0o600))

    def remove(self, number: int) -> None:
        for path in (self._file(number), self._index(number)):
            path.unlink(missing_ok=True)

    def write_index(self, number: int, data: bytes) -> None:
        self._index(number).write_bytes(data)

    def read_index(self, number: int) -> bytes | None:
        try:
            return self._index(number).read_bytes()
        except OSError:
            return None

    def _file(self, number: int) -> Path:
        return self._path / f"{number:08}{_SUFFIX}"

    def _index(self, number: int) -> Path:
        return self._file(number).with_suffix(_INDEX_SUFFIX)
