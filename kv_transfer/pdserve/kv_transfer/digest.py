"""Digests of a block's bytes in host memory: what a source publishes and a receiver checks."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from pdserve.kv_transfer.connector import BlockToRead, PoolMemory

XXH3_64 = "xxh3_64"
"""The algorithm's name, as `Open.digest_algorithms` and `Accepted.digest_algorithm` carry it."""


def block_digest(view: memoryview) -> int:
    """`xxh3_64` of the bytes, as an unsigned 64-bit number. Holds no GIL while it hashes."""
    return xxhash.xxh3_64_intdigest(view)


def block_digests(pool: PoolMemory, blocks: Sequence[int]) -> list[int]:
    """The digests of the pool's blocks, in the order given. Raises `IndexError` for a number outside the pool."""
    return [block_digest(pool.block(number)) for number in blocks]


def matching(pool: PoolMemory, blocks: Sequence[BlockToRead]) -> list[bool]:
    """Whether the bytes in each `local_block`, a number within the pool, are those that were published."""
    view, size = pool.view, pool.block_bytes
    return [
        block_digest(view[block.local_block * size : (block.local_block + 1) * size]) == block.digest
        for block in blocks
    ]
