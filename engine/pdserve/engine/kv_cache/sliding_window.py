"""`SlidingWindow`: which blocks of a sequence a later token can still see, in layers with a window or with chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.common.transfer_order import num_skipped_blocks


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The widest window of a KV cache group's layers: a token at position p attends to positions p - `num_tokens` + 1 to p. Or its
    chunks: it attends to those from the last multiple of `num_tokens` on."""

    num_tokens: int
    block_size: int
    is_chunk: bool = False

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Number of a sequence's first blocks that no token after its first `num_computed_tokens` can see."""
        return num_skipped_blocks(num_computed_tokens, self.num_tokens, self.block_size, is_chunk=self.is_chunk)

    def first_needed_block(self, num_blocks: int) -> int:
        """The first block that a hit of `num_blocks` blocks, at least 1, needs."""
        # the last block is asked for even if a window of one token, or a new chunk, does not see it
        return min(self.num_skipped_blocks(num_blocks * self.block_size), num_blocks - 1)

    def longest_hit(self, has: Callable[[int], bool], num_blocks: int) -> int:
        """Length in blocks of the longest prefix whose windowed blocks are all cached.

        has: True if the cache has the sequence's block of this index, below `num_blocks`; called once for each at most.
        """
        end = index = num_blocks
        while end > 0 and index > self.first_needed_block(end):
            index -= 1
            if not has(index):
                end = index  # a longer beginning needs this block
        return end
