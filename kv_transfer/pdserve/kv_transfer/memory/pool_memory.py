"""`PoolMemory`, the interface of memory with blocks of equal size, and `HostPool`, such memory of the host."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pdserve.common.security.block_digest import BlockDigest


class PoolMemory(Protocol):
    """`num_blocks` blocks of `block_bytes` bytes, one after the other, on the host or on a device. Thread-safe."""

    @property
    def address(self) -> int:
        """Address of the first byte, in this process."""

    @property
    def device_id(self) -> int | None:
        """Number of the device as this process counts them; None: memory of the host."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def divided(self, parts: int) -> PoolMemory:
        """The same memory in `num_blocks * parts` blocks of `block_bytes / parts` bytes. Raises: ValueError if not whole."""

    @property
    def most_lent(self) -> int:
        """Most blocks that one call of `lend` should ask for, so that room remains for other calls; at least 1."""

    def lend(self, blocks: Sequence[int], borrower: Hashable = None) -> AbstractContextManager[list[memoryview]]:
        """The bytes of these blocks, in this order, in memory of the host, while the context lasts.

        On a device this copies, and may wait for room, of which one borrower holds a part at most. Raises: IndexError for a number
        outside the pool, NoRoom.
        """

    def digests(self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest) -> list[int]:
        """The digests of these blocks, of which the first has index `indexes[0]` in its transfer.

        Raises: IndexError for a number outside the pool, NoRoom.
        """


class NoRoom(Exception):
    """Host memory through which blocks of a device are copied was in use for too long."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """A `PoolMemory` of the host: block b is `view[b * block_bytes : (b + 1) * block_bytes]`."""

    view: memoryview
    """Writable, contiguous, 1 byte per item, `num_blocks * block_bytes` long."""
    block_bytes: int
    num_blocks: int
    device_id: None = None

    @property
    def address(self) -> int:
        return int(np.frombuffer(self.view, dtype=np.uint8).ctypes.data)

    def block(self, number: int) -> memoryview:
        """The bytes of one block; raises `IndexError` for a number outside the pool."""
        if not 0 <= number < self.num_blocks:
            raise IndexError(f"block {number} is outside the pool of {self.num_blocks} blocks")
        return self.view[number * self.block_bytes : (number + 1) * self.block_bytes]

    def divided(self, parts: int) -> HostPool:
        """As `PoolMemory.divided`."""
        return self if parts == 1 else HostPool(self.view, part_bytes(self.block_bytes, parts), self.num_blocks * parts)

    @property
    def most_lent(self) -> int:
        """As `PoolMemory.most_lent`: all blocks, since nothing is copied."""
        return max(1, self.num_blocks)

    @contextmanager
    def lend(self, blocks: Sequence[int], borrower: Hashable = None) -> Iterator[list[memoryview]]:
        """As `PoolMemory.lend`, without a copy."""
        yield self.views(blocks)

    def views(self, blocks: Sequence[int]) -> list[memoryview]:
        """The blocks' bytes in this order; blocks that follow each other in memory are one view.

        Raises: IndexError for a number outside the pool.
        """
        views: list[memoryview] = []
        size = self.block_bytes
        for first, length in number_runs(blocks):
            if first < 0 or first + length > self.num_blocks:
                raise IndexError(f"blocks {first} to {first + length - 1} are not all in the pool of {self.num_blocks}")
            views.append(self.view[first * size : (first + length) * size])
        return views

    def digests(self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest) -> list[int]:
        """As `PoolMemory.digests`."""
        return [digest.of(self.block(number), index) for number, index in zip(blocks, indexes, strict=True)]


def part_bytes(block_bytes: int, parts: int) -> int:
    """Bytes of each of `parts` equal parts of a block. Raises: ValueError unless that is a whole number."""
    if parts < 1 or block_bytes % parts:
        raise ValueError(f"blocks of {block_bytes} bytes have no {parts} equal parts")
    return block_bytes // parts


def number_runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the runs of successive numbers, in the order given."""
    position = 0
    while position < len(blocks):
        first = blocks[position]
        length = 1
        while position + length < len(blocks) and blocks[position + length] == first + length:
            length += 1
        yield first, length
        position += length
