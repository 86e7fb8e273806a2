"""Digests of blocks in host memory, which a source publishes and a receiver checks."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.kv_transfer.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.connector import BlockToRead, PoolMemory


def block_digests(
    pool: PoolMemory, blocks: Sequence[int], digest: BlockDigest = XXH3, first_index: int = 0
) -> list[int]:
    """The digests of the pool's blocks, in the order given; `blocks[0]` is the block `first_index` of its transfer.

    Raises: IndexError for a number outside the pool.
    """
    return [digest.of(pool.block(number), index) for index, number in enumerate(blocks, first_index)]


def matching(pool: PoolMemory, blocks: Sequence[BlockToRead], digest: BlockDigest = XXH3) -> list[bool]:
    """Per block, True if the bytes of `local_block`, a number within the pool, have the published digest."""
    view, size = pool.view, pool.block_bytes
    return [
        digest.of(view[block.local_block * size : (block.local_block + 1) * size], block.index) == block.digest
        for block in blocks
    ]
