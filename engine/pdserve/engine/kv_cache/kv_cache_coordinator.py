"""`KVCacheCoordinator`: the block tables of all KV cache groups. A sequence's cached length is the minimum over its groups.

Groups of one shape share blocks. Their layers are equally many, or fewer by padding, so any block serves any of them, and memory
goes to the groups that need it: to those without a window where sequences are long, to all alike where they are short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, KVCacheBlock, with_group_id
from pdserve.engine.kv_cache.single_type_kv_cache_manager import (
    RestingBlocks,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
    StateManager,
    make_manager,
)
from pdserve.engine.kv_cache.sliding_window import SlidingWindow
from pdserve.engine.request import Request
from pdserve.engine.sequence_blocks import BlockCounts
from pdserve.models.kv_cache import KVCacheSpec

Room = tuple[int, ...]
"""Tokens for which a sequence has blocks, or needs them, per KV cache group."""


class KVCacheCoordinator:
    """One `SingleTypeKVCacheManager` per group, in the order of the groups."""

    def __init__(self, pool: BlockPool, block_size: int, specs: Sequence[KVCacheSpec], step_tokens: int) -> None:
        """step_tokens: of one sequence per step, at most."""
        self.block_size = block_size
        self._num_shapes = pool.num_shapes
        self.managers = tuple(
            make_manager(spec, pool, block_size, group_id, step_tokens) for group_id, spec in enumerate(specs)
        )
        self._full = [manager for manager in self.managers if not isinstance(manager, SlidingWindowManager)]
        self._windows: dict[SlidingWindow, list[SlidingWindowManager]] = {}
        for manager in self.managers:
            if isinstance(manager, SlidingWindowManager):
                self._windows.setdefault(manager.window, []).append(manager)

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes]) -> tuple[tuple[KVCacheBlock, ...], ...]:
        """Per group, the blocks of the longest beginning of a sequence that every group has, as far as a later token sees it.

        block_hashes: of the sequence's full blocks.
        """
        if len(self.managers) == 1:
            return (self.managers[0].longest_hit(block_hashes),)
        num_hit = len(block_hashes)
        for manager in self._full:
            num_hit = len(manager.longest_hit(block_hashes[:num_hit]))
        is_stable = False
        while not is_stable:
            before = num_hit
            for window, managers in self._windows.items():
                num_hit = window.longest_hit(_in_all(managers, block_hashes), num_hit)
            # a shorter hit of one window may need blocks that another has lost
            is_stable = num_hit == before or len(self._windows) == 1
        return tuple(self._hit(manager, block_hashes[:num_hit]) for manager in self.managers)

    def _hit(self, manager: SingleTypeKVCacheManager, block_hashes: Sequence[bytes]) -> tuple[KVCacheBlock, ...]:
        """Blocks of a hit that the group has."""
        if not block_hashes:
            return ()
        first = 0
        if isinstance(manager, SlidingWindowManager):
            first = manager.window.first_needed_block(len(block_hashes))
        found = (manager.find(block_hash) for block_hash in block_hashes[first:])
        return (*[NULL_BLOCK] * first, *(block for block in found if block is not None))

    def has_table(self, request: Request) -> bool:
        """True if the sequence has blocks."""
        return request.request_id in self.managers[0].tables

    def extended(
        self,
        block_hashes: Sequence[bytes],
        computed: Sequence[Sequence[KVCacheBlock | None]],
        in_tier: Callable[[bytes], bool],
    ) -> Sequence[Sequence[KVCacheBlock | None]]:
        """`computed`, the pool's hit, with as many further places as pool and host-memory tier have together; None: a block that
        only the tier has.

        block_hashes: of the sequence's full blocks. computed: per group; a group may have more places than another, of blocks
        that no token needs. in_tier: True for the name of a block in the tier.
        """

        def in_any(managers: Sequence[SingleTypeKVCacheManager]) -> Callable[[int], bool]:
            """True for the index of a block that each of these groups has in the pool or in the tier, or does not need."""

            def has(manager: SingleTypeKVCacheManager, index: int) -> bool:
                name = with_group_id(block_hashes[index], manager.group_id)
                return index < len(computed[manager.group_id]) or manager.pool.find(name) is not None or in_tier(name)

            return lambda index: all(has(manager, index) for manager in managers)

        first, num_hit = min(map(len, computed)), len(block_hashes)
        in_full = in_any(self._full)
        num_hit = next((index for index in range(first, num_hit) if not in_full(index)), num_hit)
        is_stable = False
        while not is_stable and num_hit > first:
            before = num_hit
            for window, managers in self._windows.items():
                num_hit = window.longest_hit(in_any(managers), num_hit)
            is_stable = num_hit == before
        if num_hit <= first:
            return computed
        return [
            self._extended(manager, block_hashes[:num_hit], computed[manager.group_id]) for manager in self.managers
        ]

    def _extended(
        self, manager: SingleTypeKVCacheManager, block_hashes: Sequence[bytes], computed: Sequence[KVCacheBlock | None]
    ) -> Sequence[KVCacheBlock | None]:
        if len(computed) >= len(block_hashes):
            return computed
        further = [manager.find(block_hash) for block_hash in block_hashes[len(computed) :]]
        found = [*computed, *further]
        if isinstance(manager, SlidingWindowManager):
            num_null = manager.window.first_needed_block(len(found))
            found[:num_null] = [NULL_BLOCK] * num_null
        return found

    def num_blocks_missing(
        self, request: Request, room: Room, computed: Sequence[Sequence[KVCacheBlock | None]]
    ) -> BlockCounts:
        """See `KVCacheManager.num_blocks_missing`. computed: per group; empty for none."""
        if not computed:
            computed = ((),) * len(self.managers)
        return self.by_shape(
            manager.num_blocks_missing(request, num_tokens, found)
            for manager, num_tokens, found in zip(self.managers, room, computed, strict=True)
        )

    def by_shape(self, of_groups: Iterable[int]) -> BlockCounts:
        """Sums of numbers of the groups, in their order."""
        counts = [0] * self._num_shapes
        for manager, count in zip(self.managers, of_groups, strict=True):
            counts[manager.shape] += count
        return tuple(counts)

    def touch_computed(self, request: Request, computed: Sequence[Sequence[KVCacheBlock | None]]) -> None:
        """Begin a sequence's tables with blocks from the cache, per group; empty for none. None: a new block, which is loaded."""
        for manager, found in zip(self.managers, computed or ((),) * len(self.managers), strict=True):
            manager.touch_computed(request, found)

    def fill(self, request: Request, computed: Sequence[Sequence[KVCacheBlock | None]]) -> None:
        """Allocate the blocks of `touch_computed` that are loaded."""
        for manager, found in zip(self.managers, computed, strict=True):
            manager.fill(request, found)

    def allocate(self, request: Request, room: Room) -> list[list[int]]:
        """Blocks for as many tokens; returns the rows of new ones, per group. Raises: PoolCorrupt if fewer are available."""
        return [manager.allocate(request, num_tokens) for manager, num_tokens in zip(self.managers, room, strict=True)]

    def free_skipped(self, request: Request, num_remembered: int) -> int:
        """Release blocks that nothing needs any more; returns their number."""
        return sum(manager.free_skipped(request, num_remembered) for manager in self.managers)

    def sees_freed(self, request: Request, num_computed_tokens: int) -> bool:
        """True if the next token of a sequence with as many computed tokens sees a block that it has no more."""
        return any(
            manager.num_null[request.request_id] > manager.num_skipped(request, num_computed_tokens)
            for manager in self.managers
        )

    @property
    def has_states(self) -> bool:
        """True if a group has states, which no step can take back."""
        return any(isinstance(manager, StateManager) for manager in self.managers)

    def rest(self, request: Request) -> list[RestingBlocks]:
        """Release the references of a sequence whose blocks may be revived; returns its tables."""
        return [manager.rest(request) for manager in self.managers]

    def references(self) -> Counter[int]:
        """Block id -> references by block tables."""
        counts: Counter[int] = Counter()
        for manager in self.managers:
            for request_id, table in manager.tables.items():
                table = table[manager.num_null[request_id] :]
                counts.update(block.block_id for block in table if block is not NULL_BLOCK)
        return counts


def _in_all(managers: Sequence[SlidingWindowManager], block_hashes: Sequence[bytes]) -> Callable[[int], bool]:
    """True for the index of a block that each of these groups has."""
    return lambda index: all(manager.find(block_hashes[index]) is not None for manager in managers)
