"""`SingleTypeKVCacheManager`: the block tables of sequences in one KV cache group, for one type of attention.

All groups take their blocks from one pool, those of one shape from the same blocks, and a block has the keys and values of the
layers of one group. A new type of attention
is a subclass that says which blocks a sequence needs, and a line in `make_manager`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, KVCacheBlock, with_group_id
from pdserve.engine.kv_cache.sliding_window import SlidingWindow
from pdserve.engine.request import Request
from pdserve.engine.sequence_blocks import num_window_blocks
from pdserve.models.kv_cache import (
    STATE_WINDOW,
    ChunkedLocalAttentionSpec,
    DraftHeadSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
)

RestingBlocks = tuple[tuple[KVCacheBlock, ...], tuple[int, ...]]
"""The blocks of a table without references, and their lives then."""


class SingleTypeKVCacheManager:
    """Block tables in one group. This class keeps every block of a sequence; `Request` ids are its keys."""

    def __init__(self, pool: BlockPool, block_size: int, group_id: int, shape: int) -> None:
        self.pool = pool
        self.shape = shape
        """Of the group's blocks."""
        self.block_size = block_size
        self.group_id = group_id
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_null: dict[str, int] = {}
        """Null blocks at the beginning of each block table."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Places in the block table of a sequence of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_skipped(self, request: Request, num_computed_tokens: int) -> int:
        """Number of first blocks that neither a later token nor the receiver of a transfer needs."""
        return 0

    def num_reserved_tokens(
        self, request: Request, num_computed_tokens: int, computed: Sequence[KVCacheBlock | None]
    ) -> int:
        """Tokens for which a sequence has blocks while it computes its prompt, so that it does not stop half-way.

        computed: blocks from the cache to begin with, at admission.
        """
        return request.num_tokens

    def longest_hit(self, block_hashes: Sequence[bytes]) -> tuple[KVCacheBlock, ...]:
        """The longest beginning of a sequence of which the pool has every block that a later token sees; `NULL_BLOCK` for others.

        block_hashes: of its full blocks.
        """
        found = []
        for name in self.names(block_hashes):
            block = self.pool.find(name)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """The pool's block of this group with this hash."""
        return self.pool.find(with_group_id(block_hash, self.group_id))

    def names(self, block_hashes: Sequence[bytes]) -> Iterable[bytes]:
        """The names of these blocks in the pool."""
        if self.group_id == 0:
            return block_hashes
        return (with_group_id(block_hash, self.group_id) for block_hash in block_hashes)

    def num_blocks_missing(self, request: Request, num_tokens: int, computed: Sequence[KVCacheBlock | None]) -> int:
        """See `KVCacheManager.num_blocks_missing`."""
        table = self.tables.get(request.request_id)
        have = len(table) if table is not None else len(computed)
        revived = 0 if table is not None else sum(block is None or block.ref_cnt == 0 for block in computed)
        return max(0, self.num_blocks_for(num_tokens) - have) + revived

    def growth(self, request: Request, num_tokens: int, num_given: int | None) -> int:
        """See `KVCacheManager.growth`."""
        have = len(self.tables.get(request.request_id, ())) if num_given is None else self.num_blocks_for(num_given)
        return max(0, self.num_blocks_for(num_tokens) - have)

    def touch_computed(self, request: Request, computed: Sequence[KVCacheBlock | None]) -> None:
        """Begin the table of a sequence with blocks from the cache; None for one that is loaded, which `fill` allocates. `fill` and
        `allocate` follow for all groups after all of these calls."""
        self.pool.touch(block for block in computed if block is not None)
        self.tables[request.request_id] = [NULL_BLOCK if block is None else block for block in computed]
        self.num_null[request.request_id] = _num_null(computed)

    def fill(self, request: Request, computed: Sequence[KVCacheBlock | None]) -> None:
        """Allocate blocks in the places of None. Raises: PoolCorrupt if fewer are available."""
        places = [place for place, block in enumerate(computed) if block is None]
        table = self.tables[request.request_id]
        for place, block in zip(places, self.pool.allocate(len(places), self.shape), strict=True):
            table[place] = block

    def allocate(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks for the first `num_tokens` tokens; returns the rows of new ones. Raises: PoolCorrupt if fewer are available."""
        table = self.tables[request.request_id]
        new = self.pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(table)), self.shape)
        table.extend(new)
        return [block.row for block in new]

    def rows(self, request: Request) -> list[int]:
        """Rows of the sequence's blocks, as a step reads them."""
        return [block.row for block in self.tables.get(request.request_id, ())]

    def free_skipped(self, request: Request, num_remembered: int) -> int:
        """Release blocks that nothing needs any more, if they are in the cache; returns their number.

        num_remembered: blocks of the sequence that have entered the cache.
        """
        return 0

    def remember(self, request: Request, first: int, end: int) -> None:
        """Add `table[first : end]` to the prefix cache; their hashes are known."""
        table = self.tables[request.request_id]
        first = max(first, self.num_null[request.request_id])
        for block, name in zip(table[first:end], self.names(request.block_hashes[first:end]), strict=True):
            if block is not NULL_BLOCK:
                self.pool.remember(block, name)

    def drop_from(self, request: Request, num_kept: int) -> None:
        """Release the blocks after the first `num_kept`."""
        table = self.tables[request.request_id]
        if len(table) > num_kept:
            self.pool.release(table[num_kept:])
            del table[num_kept:]

    def fork(self, request: Request, other: Request, num_full: int) -> KVCacheBlock | None:
        """Make a table for a sequence that shares another's first `num_full` blocks, with its own block after them.

        Returns the block of the other at the place of the new one, None if it has none there. The pool has a block.
        """
        table = self.tables[request.request_id]
        [own] = self.pool.allocate(1, self.shape)
        self.pool.touch(table[:num_full])
        self.tables[other.request_id] = [*table[:num_full], own]
        self.num_null[other.request_id] = self.num_null[request.request_id]
        return table[num_full] if len(table) > num_full else None

    def free(self, request: Request) -> None:
        """Release the sequence's references. No effect without any."""
        table = self.tables.pop(request.request_id, None)
        if table is not None:
            del self.num_null[request.request_id]
            self.pool.release(table)

    def rest(self, request: Request) -> RestingBlocks:
        """Release the references of a sequence whose blocks may be revived."""
        blocks = tuple(self.tables.pop(request.request_id))
        del self.num_null[request.request_id]
        self.pool.release(blocks, keep=True)
        return blocks, tuple(block.life for block in blocks)


class FullAttentionManager(SingleTypeKVCacheManager):
    """Layers that attend to the whole sequence."""


class DraftHeadManager(SingleTypeKVCacheManager):
    """The draft head's layer. A prompt whose blocks come without those of the head has none in this group, and the sequence is
    not drafted: `NULL_BLOCK` takes their places."""

    def num_skipped(self, request: Request, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.block_size if request.core.without_draft_head else 0


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Layers with a window, or with chunks: blocks outside it, or before the current chunk, are freed before the next ones are
    allocated."""

    def __init__(
        self, pool: BlockPool, block_size: int, group_id: int, shape: int, window: SlidingWindow, step_tokens: int
    ) -> None:
        """step_tokens: of one sequence per step, at most."""
        super().__init__(pool, block_size, group_id, shape)
        self.window = window
        self._num_reserved_blocks = num_window_blocks(window.num_tokens, block_size, step_tokens)

    def growth(self, request: Request, num_tokens: int, num_given: int | None) -> int:
        num_more = super().growth(request, num_tokens, num_given)
        # each further block takes the place of one before the window, while a chunk frees none before its end
        return num_more if self.window.is_chunk else min(1, num_more)

    def num_skipped(self, request: Request, num_computed_tokens: int) -> int:
        return self.window.num_skipped_blocks(num_computed_tokens)

    def num_reserved_tokens(
        self, request: Request, num_computed_tokens: int, computed: Sequence[KVCacheBlock | None]
    ) -> int:
        num_blocks = self.window.num_skipped_blocks(num_computed_tokens) + self._num_reserved_blocks
        if request.core.transfer_source:
            # a wanted source cannot be preempted. With one block per shared block in addition, it lacks none until it frees these,
            # so of several sources that share blocks the last one always moves on, and then the one before
            num_blocks += sum(block is not NULL_BLOCK and block is not None and block.ref_cnt > 0 for block in computed)
        return min(request.num_tokens, num_blocks * self.block_size)

    def longest_hit(self, block_hashes: Sequence[bytes]) -> tuple[KVCacheBlock, ...]:
        found: dict[int, KVCacheBlock] = {}

        def has(index: int) -> bool:
            block = self.find(block_hashes[index])
            if block is not None:
                found[index] = block
            return block is not None

        end = self.window.longest_hit(has, len(block_hashes))
        if end == 0:
            return ()
        first = self.window.first_needed_block(end)
        return (*[NULL_BLOCK] * first, *(found[index] for index in range(first, end)))

    def free_skipped(self, request: Request, num_remembered: int) -> int:
        table = self.tables[request.request_id]
        first = self.num_null[request.request_id]
        end = min(self.num_skipped(request, request.num_computed_tokens), num_remembered)
        if end <= first:
            return 0
        self.pool.release(table[first:end])
        table[first:end] = [NULL_BLOCK] * (end - first)
        self.num_null[request.request_id] = end
        return end - first


class StateManager(SlidingWindowManager):
    """Layers with a state per sequence: the block at a place has the state after its last token.

    A sequence writes its state into one block, which moves along its table, as long as nobody else needs that: a block that the
    prefix cache has, or another sequence refers to, remains where it is, and a new one is written. So a hit ends at a place whose
    state was in a block of its own when a step ended there.
    """

    def __init__(self, pool: BlockPool, block_size: int, group_id: int, shape: int) -> None:
        window = SlidingWindow(STATE_WINDOW, block_size)
        super().__init__(pool, block_size, group_id, shape, window, 1)

    def num_reserved_tokens(
        self, request: Request, num_computed_tokens: int, computed: Sequence[KVCacheBlock | None]
    ) -> int:
        return 0  # the state after a step is not that after a later one

    def num_blocks_missing(self, request: Request, num_tokens: int, computed: Sequence[KVCacheBlock | None]) -> int:
        table = self.tables.get(request.request_id)
        if table is not None:
            return int(self.num_blocks_for(num_tokens) > len(table) and not self._is_own(table))
        revived = sum(block is None or block.ref_cnt == 0 for block in computed)
        return int(self.num_blocks_for(num_tokens) > len(computed)) + revived

    def allocate(self, request: Request, num_tokens: int) -> list[int]:
        table = self.tables[request.request_id]
        num_more = self.num_blocks_for(num_tokens) - len(table)
        if num_more <= 0:
            return []
        if self._is_own(table):
            block, table[-1] = table[-1], NULL_BLOCK
        else:
            [block] = self.pool.allocate(1, self.shape)
        table += [*[NULL_BLOCK] * (num_more - 1), block]
        return [each.row for each in table[-num_more:]]

    def rows(self, request: Request) -> list[int]:
        """A block that was moved along has the state of the place that it left, until the next step writes it."""
        rows, table = super().rows(request), self.tables.get(request.request_id, [])
        for place in range(len(table) - 2, -1, -1):
            if table[place] is not NULL_BLOCK:
                break
            rows[place] = rows[-1]
        return rows

    @staticmethod
    def _is_own(table: Sequence[KVCacheBlock]) -> bool:
        """True if the last block is this sequence's only."""
        if not table or table[-1] is NULL_BLOCK:
            return False
        return table[-1].ref_cnt == 1 and table[-1].block_hash is None


def make_manager(
    spec: KVCacheSpec, pool: BlockPool, block_size: int, group_id: int, step_tokens: int
) -> SingleTypeKVCacheManager:
    """step_tokens: see `SlidingWindowManager`."""
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        window = SlidingWindow(spec.reach, block_size, is_chunk=isinstance(spec, ChunkedLocalAttentionSpec))
        return SlidingWindowManager(pool, block_size, group_id, spec.shape, window, step_tokens)
    if isinstance(spec, StateSpec):
        return StateManager(pool, block_size, group_id, spec.shape)
    if isinstance(spec, DraftHeadSpec):
        return DraftHeadManager(pool, block_size, group_id, spec.shape)
    return FullAttentionManager(pool, block_size, group_id, spec.shape)


def _num_null(blocks: Sequence[KVCacheBlock | None]) -> int:
    return sum(block is NULL_BLOCK for block in blocks)
