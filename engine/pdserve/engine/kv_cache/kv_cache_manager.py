"""`KVCacheManager`: the block tables of sequences, and which of their blocks the prefix cache has.

A sequence's tokens fall into half-open ranges:

    | cached | computed | scheduled now | reserved |
    0        a          b               c          d

    [0, a)  found in the prefix cache at admission, or received; shared, never written again
    [a, b)  KV computed by earlier steps
    [b, c)  KV written by the step being scheduled
    [c, d)  blocks allocated ahead (whole prompt, rest of the last block)

The manager allocates every block and frees them all at once, in `free`. Where every layer has a window, blocks behind it are freed
before the next ones are allocated; `NULL_BLOCK` takes their places, and those of blocks behind the window that were never here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from pdserve.common.block_hash import BlockHasher
from pdserve.common.request.multimodal import hashed_spans
from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, KVCacheBlock, PinnedBlocks
from pdserve.engine.kv_cache.sliding_window import SlidingWindow
from pdserve.engine.request import Request


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks from the start of a sequence."""

    blocks: tuple[KVCacheBlock, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def is_null(self) -> bool:
        """True if no block is in use: there is none, or all are behind the window."""
        return all(block is NULL_BLOCK for block in self.blocks)

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


NO_BLOCKS = KVCacheBlocks(())


@dataclass(frozen=True, slots=True)
class RestingTable:
    """A block table without references: valid while none of its blocks is handed out again."""

    blocks: tuple[KVCacheBlock, ...]
    lives: tuple[int, ...]


class KVCacheManager:
    """Block tables over one `BlockPool`."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher, sliding_window: int | None = None) -> None:
        """sliding_window: see `EngineConfig`."""
        self.pool = pool
        self.block_size = hasher.block_size
        self._window = None if sliding_window is None else SlidingWindow(sliding_window, hasher.block_size)
        self._hasher = hasher
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_remembered: dict[str, int] = {}
        self._num_null: dict[str, int] = {}
        """Null blocks at the beginning of each block table."""
        self._idle: OrderedDict[str, Request] = OrderedDict()
        """Sequences whose blocks may be taken, longest idle first."""
        self._copies: dict[str, tuple[KVCacheBlock, KVCacheBlock]] = {}
        """request_id -> (from, to) of a fork whose last block is still to be copied; the first has a reference more."""
        self.num_freed_behind_window = 0
        """Blocks since the start."""
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def get_computed_blocks(self, request: Request, limit_tokens: int) -> KVCacheBlocks:
        """The longest run of the sequence's full blocks that the cache knows, over at most `limit_tokens` tokens; with a window the
        longest of which it knows what the next token sees.

        Takes no reference: use the result before anything else is allocated.
        """
        if request.skip_reading_prefix_cache:
            return NO_BLOCKS
        hashes = request.block_hashes[: limit_tokens // self.block_size]
        if self._window is not None:
            return KVCacheBlocks(self._window.longest_hit(self.pool, hashes, _first_sent(request, len(hashes))))
        found = []
        for block_hash in hashes:
            block = self.pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return KVCacheBlocks(tuple(found))

    def seen_from(self, request: Request, computed: KVCacheBlocks, num_tokens: int) -> KVCacheBlocks:
        """`computed` without the blocks that no token after the first `num_tokens` sees, but with all their places."""
        num_null = self._num_skipped(request, num_tokens)
        if not num_null:
            return computed
        return KVCacheBlocks((NULL_BLOCK,) * num_null + computed.blocks[num_null:])

    def _num_skipped(self, request: Request, num_computed_tokens: int) -> int:
        """Number of first blocks that neither a later token nor the receiver of a transfer needs."""
        if self._window is None:
            return 0
        num_skipped = self._window.num_skipped_blocks(num_computed_tokens)
        return min(num_skipped, _first_sent(request, num_skipped))

    def num_reserved_tokens(self, request: Request, num_computed_tokens: int, step_tokens: int) -> int:
        """Tokens for which a sequence has blocks while it computes its prompt, so that it does not stop half-way: all of them, or
        with a window as many as it needs at once. step_tokens: computed per step, at most."""
        # a wanted source cannot be preempted for a block that it lacks because others share those behind its window
        if self._window is None or request.core.transfer_source:
            return request.num_tokens
        return min(request.num_tokens, self._window.reserved_tokens(num_computed_tokens, step_tokens))

    def _free_skipped(self, request: Request) -> None:
        """Release blocks behind the window that have their hashes."""
        table = self._tables.get(request.request_id)
        if self._window is None or table is None:
            return
        num_skipped = self._num_skipped(request, request.num_computed_tokens)
        first = self._num_null[request.request_id]
        end = min(num_skipped, self._num_remembered[request.request_id])
        if end > first:
            self.pool.release(table[first:end])
            table[first:end] = [NULL_BLOCK] * (end - first)
            self.num_freed_behind_window += end - first
            self._num_null[request.request_id] = end

    def num_blocks_missing(self, request: Request, num_tokens: int, computed: KVCacheBlocks = NO_BLOCKS) -> int:
        """Blocks that must come out of the pool so that `num_tokens` tokens have room.

        Cached blocks without references count, too: touching them takes them out of what is available.
        """
        table = self._tables.get(request.request_id)
        have = len(table) if table is not None else len(computed)
        revived = 0 if table is not None else sum(block.ref_cnt == 0 for block in computed.blocks)
        return max(0, -(-num_tokens // self.block_size) - have) + revived

    def allocate_slots(
        self, request: Request, num_tokens: int, computed: KVCacheBlocks = NO_BLOCKS, keep_free: int = 0
    ) -> list[int] | None:
        """Room for the sequence's first `num_tokens` tokens; returns the ids of the blocks added to its table.

        computed: cached blocks to begin with, only at admission.
        keep_free: blocks that must remain available afterwards.
        None means that there is no room, though idle sequences have lost theirs, and this one those behind its window; nothing else
        has changed.
        """
        self._free_skipped(request)
        while self.num_blocks_missing(request, num_tokens, computed) + keep_free > self.pool.num_available:
            if not self._take_from_idle(request):
                return None
        self._idle.pop(request.request_id, None)
        table = self._tables.get(request.request_id)
        if table is None:
            self.pool.touch(computed.blocks)
            table = self._tables[request.request_id] = list(computed.blocks)
            self._num_remembered[request.request_id] = len(computed)
            self._num_null[request.request_id] = computed.blocks.count(NULL_BLOCK)
            added = table
        else:
            added = []
        new = self.pool.allocate(max(0, -(-num_tokens // self.block_size) - len(table)))
        table.extend(new)
        return [block.block_id for block in (added or new)]

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """True if a running sequence's first `num_tokens` tokens have room in its table already."""
        return len(self._tables[request.request_id]) * self.block_size >= num_tokens

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Drop the KV and hashes after a sequence's first `num_tokens` tokens, of which the last is to be computed again.

        A block that the cache knows is never written again, so a partly dropped one leaves the table. The sequence loses all its
        blocks if its window then reaches back to some that were freed.
        """
        num_full, num_in_last = divmod(num_tokens - 1, self.block_size)
        del request.block_hashes[num_full:]
        table = self._tables.get(request.request_id)
        if table is None:
            return
        keeps_last = bool(num_in_last) and self._num_remembered[request.request_id] <= num_full
        num_kept = num_full + keeps_last
        self.pool.release(table[num_kept:])
        del table[num_kept:]
        self._num_remembered[request.request_id] = min(self._num_remembered[request.request_id], num_full)
        limit = num_tokens - 1 if keeps_last else num_full * self.block_size
        request.num_computed_tokens = min(request.num_computed_tokens, limit)
        if self._num_null[request.request_id] > self._num_skipped(request, request.num_computed_tokens):
            self.free(request)
            request.num_computed_tokens = 0

    def trim(self, request: Request, num_tokens: int) -> None:
        """Release the blocks behind those of a sequence's first `num_tokens` tokens: they were allocated for drafts."""
        table, num_kept = self._tables.get(request.request_id), -(-num_tokens // self.block_size)
        if table is not None and len(table) > num_kept:
            self.pool.release(table[num_kept:])
            del table[num_kept:]

    def idle(self, request: Request) -> None:
        """Keep the sequence's blocks until others need them or `allocate_slots` is called for it.

        A sequence whose blocks were taken has `num_computed_tokens == 0`; its prefix may still be in the cache.
        """
        self._idle[request.request_id] = request

    @property
    def has_window(self) -> bool:
        """True if every layer has one."""
        return self._window is not None

    @property
    def num_idle(self) -> int:
        """Sequences whose blocks may be taken."""
        return len(self._idle)

    def _take_from_idle(self, taker: Request) -> bool:
        """Free the blocks of the sequence that has been idle longest; False if there is none but the taker."""
        for request in self._idle.values():
            if request is not taker:
                self.free(request)
                request.num_computed_tokens = 0
                return True
        return False

    def fork(self, request: Request, other: Request) -> bool:
        """Make a table for a sequence that continues after another's prompt, with room for its first token.

        Full blocks are shared; a partial last one is copied before the next step computes (`take_copies`).
        False means that there are no blocks, and nothing has changed.
        """
        while self.pool.num_available < 1:
            if not self._take_from_idle(request):
                return False
        num_full, num_in_last = divmod(request.num_given_tokens, self.block_size)
        table = self._tables[request.request_id]
        [own] = self.pool.allocate(1)
        if num_in_last:
            self.pool.touch((table[num_full],))
            self._copies[other.request_id] = (table[num_full], own)
        self.pool.touch(table[:num_full])
        self._tables[other.request_id] = [*table[:num_full], own]
        self._num_remembered[other.request_id] = num_full
        self._num_null[other.request_id] = self._num_null[request.request_id]
        return True

    @property
    def has_copies(self) -> bool:
        """True if `take_copies` would return some."""
        return bool(self._copies)

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) block ids to copy before the next computation or allocation."""
        copies = [(source.block_id, target.block_id) for source, target in self._copies.values()]
        for source, _ in self._copies.values():
            self.pool.release((source,))
        self._copies.clear()
        return copies

    def count_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        """Prefix cache statistics, once per admission."""
        self.num_queried_tokens += queried_tokens
        self.num_hit_tokens += hit_tokens

    def remember_computed(self, request: Request) -> None:
        """Add the sequence's full computed blocks to the prefix cache; hashes blocks that output has filled."""
        first = self._num_remembered[request.request_id]
        full = request.num_computed_tokens // self.block_size
        if full <= first:
            return
        self._extend_hashes(request, full)
        table = self._tables[request.request_id]
        for index in range(first, full):
            self.pool.remember(table[index], request.block_hashes[index])
        self._num_remembered[request.request_id] = full

    def remember_received(self, request: Request, num_blocks: int) -> None:
        """Add the first `num_blocks` blocks, full ones only, to the prefix cache: their bytes are verified (I3)."""
        self.remember_loaded(request, min(num_blocks, request.num_given_tokens // self.block_size))

    def remember_loaded(self, request: Request, num_full_blocks: int) -> None:
        """Add the first `num_full_blocks` blocks, whose hashes are known and whose bytes are there, to the prefix cache."""
        table = self._tables[request.request_id]
        for index in range(self._num_remembered[request.request_id], num_full_blocks):
            self.pool.remember(table[index], request.block_hashes[index])
        self._num_remembered[request.request_id] = max(self._num_remembered[request.request_id], num_full_blocks)

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        known = len(request.block_hashes)
        if known < num_blocks:
            previous = request.block_hashes[-1] if known else request.core.hash_root
            first = known * self.block_size
            tokens = request.token_ids[first : num_blocks * self.block_size]
            spans = hashed_spans(request.core.mm_features, first) if request.core.mm_features else ()
            request.block_hashes.extend(self._hasher.extend(previous, tokens, spans))

    def hold(self, request: Request, first_index: int, end_index: int) -> PinnedBlocks:
        """A hold on `table[first_index : end_index]`."""
        return self.pool.hold(self._tables[request.request_id][first_index:end_index])

    def block_ids(self, request: Request) -> list[int]:
        return [block.block_id for block in self._tables.get(request.request_id, ())]

    def num_blocks(self, request: Request) -> int:
        return len(self._tables.get(request.request_id, ()))

    def free(self, request: Request) -> None:
        """Release the sequence's references; holds keep theirs. No effect without references."""
        if (copy := self._copies.pop(request.request_id, None)) is not None:
            self.pool.release(copy[:1])
        table = self._tables.pop(request.request_id, None)
        self._idle.pop(request.request_id, None)
        if table is not None:
            del self._num_remembered[request.request_id]
            del self._num_null[request.request_id]
            self.pool.release(table)

    def rest(self, request: Request) -> RestingTable:
        """Release the sequence's references, and keep its block table in case `Want` still arrives."""
        blocks = self._tables.pop(request.request_id)
        del self._num_remembered[request.request_id]
        del self._num_null[request.request_id]
        table = RestingTable(tuple(blocks), tuple(block.life for block in blocks))
        self.pool.release(blocks, keep=True)
        return table

    def revive(self, request: Request, table: RestingTable) -> bool:
        """Reclaim a resting block table; False, with nothing changed, if one of its blocks has been reused."""
        if any(block.life != life for block, life in zip(table.blocks, table.lives, strict=True)):
            return False
        self.pool.touch(table.blocks)
        self._tables[request.request_id] = list(table.blocks)
        self._num_remembered[request.request_id] = request.num_computed_tokens // self.block_size
        self._num_null[request.request_id] = table.blocks.count(NULL_BLOCK)
        return True

    def references(self) -> dict[int, int]:
        """Block id -> references by block tables and by pending copies; for the pool check."""
        counts = Counter(source.block_id for source, _ in self._copies.values())
        for request_id, table in self._tables.items():
            for block in table[self._num_null[request_id] :]:
                counts[block.block_id] += 1
        return counts


def _first_sent(request: Request, otherwise: int) -> int:
    """The first block that a transfer source must keep for its receiver, 0 while none has asked; `otherwise` if it is no source."""
    if not request.core.transfer_source:
        return otherwise
    return request.wanted_from or 0
