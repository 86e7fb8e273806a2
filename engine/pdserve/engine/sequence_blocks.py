"""How many blocks a sequence has at most, over all KV cache groups, and how long one may be in a pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pdserve.models.kv_cache import KVCacheSpec, SlidingWindowSpec


def num_window_blocks(window: int, block_size: int, step_tokens: int) -> int:
    """Blocks of a sequence that computes at most `step_tokens` per step and never needs more than it has: what it sees and a step,
    rounded up to blocks at both ends."""
    return -(-(window - 1 + step_tokens) // block_size) + 1


def max_sequence_blocks(specs: Sequence[KVCacheSpec], num_tokens: int, block_size: int, step_tokens: int) -> int:
    """Blocks of a sequence of `num_tokens` tokens that computes at most `step_tokens` per step.

    specs: of the KV cache groups. With one group all of its blocks, with or without a window: a transfer source keeps them.
    """
    num_blocks = -(-num_tokens // block_size)
    if len(specs) == 1:
        return num_blocks
    return sum(min(num_blocks, _limit(spec, num_blocks, block_size, step_tokens)) for spec in specs)


_MAX_BLOCKS = 1 << 48


def max_sequence_tokens(specs: Sequence[KVCacheSpec], num_blocks: int, block_size: int, step_tokens: int) -> int:
    """Tokens of the longest sequence whose `max_sequence_blocks` are no more than `num_blocks`."""

    def needed(of_group: int) -> int:
        return max_sequence_blocks(specs, of_group * block_size, block_size, step_tokens)

    # no machine has so many blocks, and `range` has no larger numbers
    num_blocks = min(num_blocks, _MAX_BLOCKS)
    return (bisect_right(range(num_blocks + 1), num_blocks, key=needed) - 1) * block_size


def _limit(spec: KVCacheSpec, num_blocks: int, block_size: int, step_tokens: int) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return num_window_blocks(spec.sliding_window, block_size, step_tokens)
    return num_blocks
