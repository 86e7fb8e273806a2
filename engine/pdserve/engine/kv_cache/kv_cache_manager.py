"""`KVCacheManager`: the block tables of sequences, and which of their blocks the prefix cache has.

A sequence's tokens fall into half-open ranges:

    | cached | computed | scheduled now | reserved |
    0        a          b               c          d

    [0, a)  found in the prefix cache at admission, or received; shared, never written again
    [a, b)  KV computed by earlier steps
    [b, c)  KV written by the step being scheduled
    [c, d)  blocks allocated ahead (whole prompt, rest of the last block)

The manager allocates every block and frees them all at once, in `free`. A `KVCacheCoordinator` has the tables of each KV cache
group. In groups of layers with a window, blocks outside it are freed before the next ones are allocated; `NULL_BLOCK` takes their
places, and those of blocks outside the window that were never here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdserve.common.block_hash import BlockHasher
from pdserve.common.request.engine_types import Migration
from pdserve.common.request.multimodal import hashed_spans
from pdserve.common.transfer_order import TransferOrder
from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, KVCacheBlock, PinnedBlocks
from pdserve.engine.kv_cache.kv_cache_coordinator import KVCacheCoordinator, Room
from pdserve.engine.kv_cache.single_type_kv_cache_manager import (
    DraftHeadManager,
    RestingBlocks,
    StateManager,
)
from pdserve.engine.request import Request
from pdserve.engine.sequence_blocks import BlockCounts, RowPairs, pairs_by_shape
from pdserve.models.kv_cache import DraftHeadSpec, FullAttentionSpec, KVCacheSpec, group_chunks, group_windows


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks from the start of a sequence."""

    blocks: Sequence[Sequence[KVCacheBlock | None]]
    """Per KV cache group; empty for none in any. None: a block that is loaded from the host-memory tier."""

    def __len__(self) -> int:
        """Places that every group has: of a hit, those of each."""
        return min(map(len, self.blocks), default=0)

    @property
    def is_null(self) -> bool:
        """True if no block is in use: there is none, or all are outside the window."""
        return all(block is NULL_BLOCK for of_group in self.blocks for block in of_group)


NO_BLOCKS = KVCacheBlocks(())


@dataclass(frozen=True, slots=True)
class RestingTable:
    """Block tables without references: a block is valid while it is not handed out again."""

    order: TransferOrder
    """Numbers of the blocks in a transfer."""
    groups: tuple[RestingBlocks, ...]


class KVCacheManager:
    """Block tables over a `BlockPool`."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        specs: Sequence[KVCacheSpec],
        step_tokens: int,
    ) -> None:
        """specs: of the KV cache groups. step_tokens: computed of one sequence per step, at most."""
        self.pool = pool
        self.block_size = hasher.block_size
        self.coordinator = KVCacheCoordinator(pool, hasher.block_size, specs, step_tokens)
        self.num_groups = len(specs)
        self.keeps_every_block = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)
        """True if there is one group, of which a sequence keeps all blocks."""
        self.has_states = self.coordinator.has_states
        """True if a group has states, which no step can take back."""
        self.per_place = self.coordinator.by_shape([1] * len(specs))
        """Blocks of a place, one in each group."""
        self._group_windows, self._group_chunks = group_windows(specs), group_chunks(specs)
        moved = specs[:-1] if isinstance(specs[-1], DraftHeadSpec) else specs
        self._moved_windows, self._moved_chunks = group_windows(moved), group_chunks(moved)
        """Of the groups without that of a draft head."""
        self._hasher = hasher
        self._num_remembered: dict[str, int] = {}
        """Blocks at the beginning of each sequence that have entered the cache, or came from there; equal in all groups."""
        self._without_drafts: set[str] = set()
        """See `lacks_draft_entries`."""
        self._idle: OrderedDict[str, Request] = OrderedDict()
        """Sequences whose blocks may be taken, longest idle first."""
        self._copies: dict[str, list[tuple[KVCacheBlock, KVCacheBlock]]] = {}
        """request_id -> (from, to), per group, of a fork whose last block is still to be copied; the first has a reference more."""
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
        return KVCacheBlocks(self.coordinator.find_longest_cache_hit(hashes))

    def get_blocks_to_keep(self, request: Request, num_tokens: int) -> KVCacheBlocks:
        """As `get_computed_blocks`, of a sequence whose further blocks are received: the longest run of which no block is missing
        that a token after the first `num_tokens` sees."""
        if self.num_groups == 1:
            return self._seen_from(request, self.get_computed_blocks(request, num_tokens), num_tokens)
        unneeded = self._seen_from(request, NO_BLOCKS, num_tokens)
        if request.skip_reading_prefix_cache:
            return unneeded
        hashes = request.block_hashes[: num_tokens // self.block_size]
        places = unneeded.blocks or ((),) * self.num_groups
        return KVCacheBlocks(self.coordinator.extended(hashes, places, lambda name: False))

    def _seen_from(self, request: Request, computed: KVCacheBlocks, num_tokens: int) -> KVCacheBlocks:
        """`computed` without the blocks that no token after the first `num_tokens` sees, but with all their places."""
        nulls = [manager.num_skipped(request, num_tokens) for manager in self.coordinator.managers]
        if not any(nulls):
            return computed
        found = computed.blocks or ((),) * self.num_groups
        groups = zip(nulls, found, strict=True)
        return KVCacheBlocks(tuple((*[NULL_BLOCK] * num_null, *blocks[num_null:]) for num_null, blocks in groups))

    def room(
        self, request: Request, num_computed_tokens: int, num_tokens: int, computed: KVCacheBlocks = NO_BLOCKS
    ) -> Room:
        """Tokens for which a sequence has blocks while it computes its prompt, so that it does not stop half-way: all of them, or
        in groups with a window as many as it needs at once; at least `num_tokens`. computed: cached blocks to begin with, at
        admission."""
        found = computed.blocks or ((),) * self.num_groups
        return tuple(
            max(num_tokens, manager.num_reserved_tokens(request, num_computed_tokens, blocks))
            for manager, blocks in zip(self.coordinator.managers, found, strict=True)
        )

    def num_blocks_missing(
        self, request: Request, room: int | Room, computed: KVCacheBlocks = NO_BLOCKS
    ) -> BlockCounts:
        """Blocks that must come out of the pool so that so many tokens have room. room: an int for every group alike.

        Cached blocks without references count, too: touching them takes them out of what is available.
        """
        return self.coordinator.num_blocks_missing(request, self._of_groups(room), computed.blocks)

    def _of_groups(self, room: int | Room) -> Room:
        return (room,) * self.num_groups if isinstance(room, int) else room

    def chunk(self, request: Request, num_computed_tokens: int, num_tokens: int) -> int:
        """Tokens of a step that may compute `num_tokens` of a sequence.

        With states, no more than up to the last full block: the prefix cache has the state where a step ends. The last token of a
        sequence with a grammar is computed by itself, since it is computed again if its mask is late.
        """
        if num_tokens <= 1 or not self.has_states:
            return num_tokens
        num_before = request.num_tokens - 1 - num_computed_tokens
        if self.pool.enables_caching:
            end = num_computed_tokens + min(num_tokens, num_before)
            num_full = end // self.block_size * self.block_size
            if num_full > num_computed_tokens:
                return num_full - num_computed_tokens
        return num_tokens if request.grammar is None else min(num_tokens, num_before)

    def num_drafts_in_block(self, request: Request) -> int:
        """Drafts that have room in the block of a sequence's last known token."""
        return self.block_size - 1 - (request.num_tokens - 1) % self.block_size

    def allocate_slots(
        self,
        request: Request,
        room: int | Room,
        computed: KVCacheBlocks = NO_BLOCKS,
        keep_free: BlockCounts | None = None,
        num_known: int | None = None,
    ) -> list[list[int]] | None:
        """Room for a sequence's first tokens; returns the rows of the blocks added to its tables, per group, [] if there are none.

        room: tokens; an int for every group alike. computed: cached blocks to begin with, only at admission. keep_free: blocks that
        must remain available afterwards; None: none.
        num_known: places from the first of which `computed` has no block that is loaded; None:
        all.
        None means that there is no room, though idle sequences have lost their blocks, and this one those outside its window;
        nothing else has changed.
        """
        coordinator, tokens = self.coordinator, self._of_groups(room)
        has_table = coordinator.has_table(request)
        if has_table and not self.keeps_every_block:
            self.num_freed_behind_window += coordinator.free_skipped(request, self._num_remembered[request.request_id])
        remain = keep_free or (0,) * self.pool.num_shapes
        while not self.pool.has(coordinator.num_blocks_missing(request, tokens, computed.blocks), remain):
            if not self._take_from_idle(request):
                return None
        self._idle.pop(request.request_id, None)
        if has_table:
            new = coordinator.allocate(request, tokens)
            return new if any(new) else []
        coordinator.touch_computed(request, computed.blocks)
        if num_known is not None:
            coordinator.fill(request, computed.blocks)
        self._num_remembered[request.request_id] = len(computed) if num_known is None else num_known
        coordinator.allocate(request, tokens)
        return self.block_rows(request)

    def places(self, count: int) -> BlockCounts:
        """Blocks of as many places."""
        return tuple(count * of_place for of_place in self.per_place)

    def state_places(self, count: int) -> BlockCounts:
        """Blocks of as many places in groups with only states."""
        return self.coordinator.by_shape(count * isinstance(each, StateManager) for each in self.coordinator.managers)

    def growth(self, request: Request, num_tokens: int, num_given: int | None = None) -> BlockCounts:
        """Blocks that a sequence takes at most until it has so many tokens, in a group with a window at a time.

        num_given: tokens for which it will have room, of a sequence without block tables; None: those of its tables.
        """
        return self.coordinator.by_shape(
            manager.growth(request, num_tokens, num_given) for manager in self.coordinator.managers
        )

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """True if a running sequence's first `num_tokens` tokens have room in its tables already."""
        has_room = True
        for (
            manager
        ) in self.coordinator.managers:  # no call more than needed: every running sequence comes here in every step
            has_room &= len(manager.tables[request.request_id]) * self.block_size >= num_tokens
        return has_room

    def num_slots(self, request: Request) -> int:
        """Tokens of a sequence for which there is room in its table of every group."""
        return self.block_size * min(
            len(manager.tables.get(request.request_id, ())) for manager in self.coordinator.managers
        )

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Drop the KV and hashes after a sequence's first `num_tokens` tokens, of which the last is to be computed again.

        A block that the cache knows is never written again, so a partly dropped one leaves the table. The sequence loses all its
        blocks if its window then reaches back to some that were freed, or if its state is that of a dropped token.
        """
        num_full, num_in_last = divmod(num_tokens - 1, self.block_size)
        del request.block_hashes[num_full:]
        if not self.coordinator.has_table(request):
            return
        keeps_last = bool(num_in_last) and self._num_remembered[request.request_id] <= num_full
        for manager in self.coordinator.managers:
            manager.drop_from(request, num_full + keeps_last)
        self._num_remembered[request.request_id] = min(self._num_remembered[request.request_id], num_full)
        limit = num_tokens - 1 if keeps_last else num_full * self.block_size
        goes_back = request.num_computed_tokens > limit
        request.num_computed_tokens = min(request.num_computed_tokens, limit)
        lacks_state = goes_back and self.has_states
        if lacks_state or self.coordinator.sees_freed(request, request.num_computed_tokens):
            self.free(request)
            request.num_computed_tokens = 0

    def drop_state(self, request: Request) -> None:
        """With states, drop all blocks of a sequence whose state is that of a token it does not have: it is computed again."""
        if self.has_states:
            self.free(request)
            request.num_computed_tokens = 0

    def trim(self, request: Request, num_tokens: int) -> None:
        """Release the blocks after those of a sequence's first `num_tokens` tokens: they were allocated for drafts."""
        if self.coordinator.has_table(request):
            for manager in self.coordinator.managers:
                manager.drop_from(request, manager.num_blocks_for(num_tokens))

    def idle(self, request: Request) -> None:
        """Keep the sequence's blocks until others need them or `allocate_slots` is called for it.

        A sequence whose blocks were taken has `num_computed_tokens == 0`; its prefix may still be in the cache.
        """
        self._idle[request.request_id] = request

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
        """Make tables for a sequence that continues after another's prompt, with room for its first token.

        Full blocks are shared; a partial last one is copied before the next step computes (`take_copies`).
        False means that there are no blocks, and nothing has changed.
        """
        while not self.pool.has(self.per_place):
            if not self._take_from_idle(request):
                return False
        num_full, num_in_last = divmod(request.num_given_tokens, self.block_size)
        copies = []
        for manager in self.coordinator.managers:
            source = manager.fork(request, other, num_full)
            if num_in_last and source is not None:
                self.pool.touch((source,))
                copies.append((source, manager.tables[other.request_id][-1]))
        if copies:
            self._copies[other.request_id] = copies
        self._num_remembered[other.request_id] = num_full
        if request.request_id in self._without_drafts:
            self._without_drafts.add(other.request_id)
        return True

    @property
    def has_copies(self) -> bool:
        """True if `take_copies` would return some."""
        return bool(self._copies)

    def take_copies(self) -> RowPairs:
        """(from, to) rows to copy before the next computation or allocation, per shape; empty without any."""
        copies = [pair for of_fork in self._copies.values() for pair in of_fork]
        self._copies.clear()
        self.pool.release([source for source, _ in copies])
        if not copies:
            return []
        return pairs_by_shape(
            self.pool.num_shapes, ((source.shape, source.row, target.row) for source, target in copies)
        )

    def count_lookup(self, request: Request, hit_tokens: int) -> None:
        """Prefix cache statistics of an admission, before `Request.found_cached`; no effect where the cache is not looked into,
        as in vLLM. A sequence that is admitted again, since not all of its blocks came, adds only what it finds more."""
        if not self.pool.enables_caching or request.skip_reading_prefix_cache:
            return
        if request.num_cached_tokens < 0:
            self.num_queried_tokens += request.num_given_tokens
        self.num_hit_tokens += max(0, hit_tokens - request.num_found_in_pool)

    def remember_computed(self, request: Request) -> None:
        """Add the sequence's full computed blocks to the prefix cache; hashes blocks that output has filled."""
        first = self._num_remembered[request.request_id]
        full = request.num_computed_tokens // self.block_size
        if full <= first:
            return
        self._extend_hashes(request, full)
        self.remember_loaded(request, full)

    def remember_received(self, request: Request, num_blocks: int) -> None:
        """Add the first `num_blocks` blocks, full ones only, to the prefix cache: their bytes are verified (I3)."""
        self.remember_loaded(request, min(num_blocks, request.num_given_tokens // self.block_size))

    def remember_loaded(self, request: Request, num_full_blocks: int) -> None:
        """Add the first `num_full_blocks` blocks, whose hashes are known and whose bytes are there, to the prefix cache."""
        first = self._num_remembered[request.request_id]
        if num_full_blocks > first:
            num_lacking = 0  # blocks with entries of a draft head that have not come
            if self.lacks_draft_entries(request):
                num_lacking = -(-request.num_given_tokens // self.block_size)
            for manager in self.coordinator.managers:
                lacks = isinstance(manager, DraftHeadManager)
                manager.remember(request, max(first, num_lacking) if lacks else first, num_full_blocks)
            self._num_remembered[request.request_id] = num_full_blocks

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        known = len(request.block_hashes)
        if known < num_blocks:
            previous = request.block_hashes[-1] if known else request.core.hash_root
            first = known * self.block_size
            tokens = request.token_ids[first : num_blocks * self.block_size]
            spans = hashed_spans(request.core.mm_features, first) if request.core.mm_features else ()
            request.block_hashes.extend(self._hasher.extend(previous, tokens, spans))

    def transfer_order(self, request: Request) -> TransferOrder:
        """The numbers of the blocks of a sequence's given tokens in a transfer."""
        windows, chunks = self._group_windows, self._group_chunks
        if request.core.without_draft_head:
            windows, chunks = self._moved_windows, self._moved_chunks
        return TransferOrder.of(windows, request.num_given_tokens, self.block_size, chunks)

    def order_of_blocks(self, num_blocks: int) -> TransferOrder:
        """The numbers of the first `num_blocks` full blocks of any sequence in a transfer between prefix caches."""
        num_tokens = num_blocks * self.block_size
        return TransferOrder.of(self._group_windows, num_tokens, self.block_size, self._group_chunks)

    def migration(self, request: Request, *, without_draft_head: bool) -> Migration:
        """What a worker is to receive that continues the sequence after its last token, whose KV is still to be computed."""
        num_tokens, hashes = request.num_computed_tokens, request.block_hashes
        core = msgspec.structs.replace(request.core, mm_features=request.core.sent_mm_features)
        sent = [*core.sent_prompt_token_ids, *request.token_ids[request.num_prompt_tokens : num_tokens]]
        if core.encoder_prompt is not None:
            # blocks of the engine begin with the encoder's slots
            hashes = self._hasher.extend(core.hash_root, sent, hashed_spans(core.mm_features))
        return Migration(
            num_tokens,
            len(sent),
            request.token_ids[-1],
            self._hasher.request_digest(
                core.hash_root, hashes[: len(sent) // self.block_size], sent, core.digest_extras
            ),
            without_draft_head or self.lacks_draft_entries(request),
        )

    def find_resting(self, block_hashes: Sequence[bytes]) -> RestingTable:
        """The longest run of a sequence's full blocks that the prefix cache has, as far as the next token sees them."""
        found = self.coordinator.find_longest_cache_hit(block_hashes)
        groups = tuple((blocks, tuple(block.life for block in blocks)) for blocks in found)
        return RestingTable(self.order_of_blocks(min(map(len, found))), groups)

    def hold_resting(self, table: RestingTable, first_index: int) -> PinnedBlocks | None:
        """A hold on the blocks of a resting table from this number on; None if one of them has been reused since."""
        blocks = []
        for group, place in table.order.blocks(first_index, len(table.order)):
            of_group, lives = table.groups[group]
            if of_group[place] is NULL_BLOCK or of_group[place].life != lives[place]:
                return None
            blocks.append(of_group[place])
        return self.pool.hold(blocks)

    def expect_received(self, request: Request) -> None:
        """Note that a transfer fills the blocks of a sequence's given tokens."""
        if request.core.without_draft_head and isinstance(self.coordinator.managers[-1], DraftHeadManager):
            self._without_drafts.add(request.request_id)

    def lacks_draft_entries(self, request: Request) -> bool:
        """True if the draft head's blocks of a sequence's given tokens have not come with the others."""
        return request.request_id in self._without_drafts

    def hold_places(self, request: Request, places: Sequence[tuple[int, int]]) -> PinnedBlocks:
        """A hold on blocks of a sequence. places: (group, index in its table)."""
        tables = [manager.tables[request.request_id] for manager in self.coordinator.managers]
        return self.pool.hold([tables[group][place] for group, place in places])

    def block_rows(self, request: Request) -> list[list[int]]:
        """Per group, the rows of a sequence's block table."""
        return [manager.rows(request) for manager in self.coordinator.managers]

    def has_blocks(self, request: Request) -> bool:
        """True if the sequence has block tables."""
        return self.coordinator.has_table(request)

    def num_blocks(self, request: Request) -> int:
        """Places in the block tables of a sequence, of all groups."""
        return sum(len(manager.tables.get(request.request_id, ())) for manager in self.coordinator.managers)

    def free(self, request: Request) -> None:
        """Release the sequence's references; holds keep theirs. No effect without references."""
        for source, _ in self._copies.pop(request.request_id, ()):
            self.pool.release((source,))
        self._idle.pop(request.request_id, None)
        self._without_drafts.discard(request.request_id)
        self._num_remembered.pop(request.request_id, None)
        for manager in self.coordinator.managers:
            manager.free(request)

    def rest(self, request: Request) -> RestingTable:
        """Release the sequence's references, and keep its block tables in case `Want` still arrives."""
        del self._num_remembered[request.request_id]
        return RestingTable(self.transfer_order(request), tuple(self.coordinator.rest(request)))

    def references(self) -> dict[int, int]:
        """Block id -> references by block tables and by pending copies; for the pool check."""
        counts = self.coordinator.references()
        counts.update(Counter(source.block_id for copies in self._copies.values() for source, _ in copies))
        return counts
