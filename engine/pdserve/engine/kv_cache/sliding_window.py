"""`SlidingWindow`: which blocks of a sequence a later token can still see, in a cache of which every layer has a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, KVCacheBlock


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The widest window of a cache's layers. A token at position p attends to positions p - `num_tokens` + 1 to p."""

    num_tokens: int
    block_size: int

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Number of a sequence's first blocks that no token after its first `num_computed_tokens` can see."""
        return max(0, num_computed_tokens - self.num_tokens + 1) // self.block_size

    def reserved_tokens(self, num_computed_tokens: int, step_tokens: int) -> int:
        """Tokens for which a sequence has blocks if it computes at most `step_tokens` per step and never needs more blocks than it
        has: what it sees and a step, rounded up to blocks at both ends."""
        num_blocks = -(-(self.num_tokens - 1 + step_tokens) // self.block_size) + 1
        return (self.num_skipped_blocks(num_computed_tokens) + num_blocks) * self.block_size

    def longest_hit(self, pool: BlockPool, block_hashes: Sequence[bytes], keep_from: int) -> tuple[KVCacheBlock, ...]:
        """The longest beginning of a sequence of which the pool has every block that a token after it can see.

        block_hashes: of the sequence's full blocks. keep_from: blocks from this one on are needed, seen or not. Blocks that are not
        needed are `NULL_BLOCK`.
        """
        end = len(block_hashes)
        while end > 0:
            # the last block is asked for even if a window of one token does not see it
            first = min(self.num_skipped_blocks(end * self.block_size), keep_from, end - 1)
            found = []
            for block_hash in block_hashes[first:end]:
                if (block := pool.find(block_hash)) is None:
                    break
                found.append(block)
            if len(found) == end - first:
                return (*[NULL_BLOCK] * first, *found)
            end = first + len(found)  # a longer beginning needs the block that is not there
        return ()
