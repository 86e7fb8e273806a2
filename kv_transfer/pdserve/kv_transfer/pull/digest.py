"""Digests of blocks, which a source publishes and a receiver checks."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.common.security.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.memory.pool_memory import PoolMemory


def block_digests(
    pool: PoolMemory, blocks: Sequence[int], digest: BlockDigest = XXH3, first_index: int = 0
) -> list[int]:
    """The digests of the pool's blocks, in the order given; `blocks[0]` is the block `first_index` of its transfer.

    Raises: IndexError for a number outside the pool, NoRoom.
    """
    return pool.digests(blocks, range(first_index, first_index + len(blocks)), digest)


def matching(pool: PoolMemory, blocks: Sequence[BlockToRead], digest: BlockDigest = XXH3) -> list[bool]:
    """Per block, True if the bytes of `local_block`, a number within the pool, have the published digest."""
    found = pool.digests([block.local_block for block in blocks], [block.index for block in blocks], digest)
    return [block.digest == value for block, value in zip(blocks, found, strict=True)]
