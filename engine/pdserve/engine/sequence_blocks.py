"""How many blocks a sequence has at most, over all KV cache groups, and how long one may be in a pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import gt

from pdserve.models.kv_cache import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec, StateSpec

BlockCounts = tuple[int, ...]
"""Numbers of blocks, by shape."""
RowPairs = list[list[tuple[int, int]]]
"""By shape of blocks, (from, to) rows of two tensors between which blocks are copied."""


def pairs_by_shape(num_shapes: int, copies: Iterable[tuple[int, int, int]]) -> RowPairs:
    """copies: (shape, from row, to row) of each block."""
    by_shape: RowPairs = [[] for _ in range(num_shapes)]
    for shape, source, target in copies:
        by_shape[shape].append((source, target))
    return by_shape


def num_window_blocks(window: int, block_size: int, step_tokens: int) -> int:
    """Blocks of a sequence that computes at most `step_tokens` per step and never needs more than it has: what it sees and a step,
    rounded up to blocks at both ends. window: tokens that one sees at most, of a window or a chunk."""
    return -(-(window - 1 + step_tokens) // block_size) + 1


def max_sequence_blocks(
    specs: Sequence[KVCacheSpec], num_tokens: int, block_size: int, step_tokens: int
) -> BlockCounts:
    """Blocks of a sequence of `num_tokens` tokens that computes at most `step_tokens` per step, by shape.

    specs: of the KV cache groups. With one group all of its blocks, with or without a window: a transfer source keeps them.
    """
    num_blocks = -(-num_tokens // block_size)
    if len(specs) == 1 and not isinstance(specs[0], StateSpec):
        return (num_blocks,)
    counts = [0] * (max(spec.shape for spec in specs) + 1)
    for spec in specs:
        counts[spec.shape] += min(num_blocks, _limit(spec, num_blocks, block_size, step_tokens))
    return tuple(counts)


_MAX_BLOCKS = 1 << 48
_STATES = 2
"""Of a sequence: the one that a step reads and the one that it writes."""


def max_sequence_tokens(
    specs: Sequence[KVCacheSpec], num_blocks: BlockCounts, block_size: int, step_tokens: int
) -> int:
    """Tokens of the longest sequence whose `max_sequence_blocks` are no more than `num_blocks` of any shape."""

    def exceeds(of_group: int) -> bool:
        needed = max_sequence_blocks(specs, of_group * block_size, block_size, step_tokens)
        return any(map(gt, needed, num_blocks))

    # no machine has so many blocks, and `range` has no larger numbers; a group of states has as many for a sequence of any length
    most = _MAX_BLOCKS if all(isinstance(spec, StateSpec) for spec in specs) else min(max(num_blocks), _MAX_BLOCKS)
    return (bisect_left(range(most + 1), True, key=exceeds) - 1) * block_size


def _limit(spec: KVCacheSpec, num_blocks: int, block_size: int, step_tokens: int) -> int:
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return num_window_blocks(spec.reach, block_size, step_tokens)
    return _STATES if isinstance(spec, StateSpec) else num_blocks
