"""`SharedBlocks`: what a store has that several engines share, in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class SharedBlocks:
    """A `BlockStore` of any number of engines. Blocks may be taken out of it at any moment."""

    def __init__(self, max_blocks: int = 1 << 30) -> None:
        """max_blocks: it gives up the oldest beyond."""
        self.max_blocks = max_blocks
        self.blocks: dict[bytes, tuple[bytes, int]] = {}
        """By name: bytes and digest."""
        self.num_writes = 0
        self.num_repeated = 0
        """Writes of what was there."""
        self.num_lookups = 0
        self._lock = threading.Lock()

    def names(self) -> list[bytes]:
        return []

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            self.num_lookups += 1
            return [name for name in names if name in self.blocks]

    def write(self, name: bytes, data: memoryview, digest: int) -> list[bytes]:
        with self._lock:
            self.num_repeated += name in self.blocks
            if name not in self.blocks:
                self.num_writes += 1
                self.blocks[name] = bytes(data), digest
            if len(self.blocks) > self.max_blocks:
                del self.blocks[next(iter(self.blocks))]
        return []

    def read(self, name: bytes, into: memoryview) -> int | None:
        with self._lock:
            data, digest = self.blocks.get(name, (b"", 0))
        if len(data) != len(into):
            return None
        into[:] = data
        return digest

    def forget(self, name: bytes) -> None:
        with self._lock:
            self.blocks.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self.blocks.clear()

    def close(self) -> None:
        """Other engines go on."""
