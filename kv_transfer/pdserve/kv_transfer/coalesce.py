"""Merges neighbouring blocks of a pool into runs: one buffer of a vectored call, or one copy, per run instead of per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.kv_transfer.connector import PoolMemory


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


def coalesce_contiguous(pool: PoolMemory, blocks: Sequence[int]) -> list[memoryview]:
    """The blocks' bytes in the order given, with blocks that follow each other in memory merged into one view.

    Raises `IndexError` for a number outside the pool.
    """
    views: list[memoryview] = []
    size = pool.block_bytes
    for first, length in number_runs(blocks):
        if first < 0 or first + length > pool.num_blocks:
            raise IndexError(f"blocks {first} to {first + length - 1} are not all in the pool of {pool.num_blocks}")
        views.append(pool.view[first * size : (first + length) * size])
    return views
