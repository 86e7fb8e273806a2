"""`BlockPool`: the free blocks, the cached ones and their references. Only the engine thread touches it.

A block is, at any time, exactly one of

    free      no references, content unknown
    cached    no references, content known by its hash: found again, or reused when free ones run out (least recent first)
    in use    at least one sequence or hold refers to it

and free + cached + in use == total (I2). With a `HostTier`, the content of a cached block that is reused is kept there, and with a
`StoreTier` also below it.

Blocks of different shapes are handed out by themselves: a group's blocks have the group's shape. What is counted per shape is a
`BlockCounts`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.common.block_hash import BLOCK_HASH_BYTES
from pdserve.engine.kv_cache.host_tier import HostTier
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.sequence_blocks import BlockCounts


class PoolCorrupt(RuntimeError):
    """The pool's books do not add up: a bug."""


def with_group_id(block_hash: bytes, group_id: int) -> bytes:
    """The name of a block in the pool: the hash of its tokens, and the KV cache group whose layers it has. In group 0 the hash."""
    return block_hash if group_id == 0 else block_hash + group_id.to_bytes(1)


def added(*counts: BlockCounts) -> BlockCounts:
    """Sums, by shape."""
    return tuple(map(sum, zip(*counts, strict=True)))


class KVCacheBlock:
    """One block's bookkeeping; its bytes are row `row` of the tensor of its shape."""

    __slots__ = ("block_hash", "block_id", "life", "ref_cnt", "row", "shape")

    def __init__(self, block_id: int, shape: int = 0, row: int | None = None) -> None:
        """row: default: the id, as with one shape."""
        self.block_id = block_id
        """Different for all blocks of the pool."""
        self.shape = shape
        self.row = block_id if row is None else row
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        """With its group, see `with_group_id`."""
        self.life = 0
        """Number of times that it was allocated; while it is unchanged, so is the block's content."""

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


NULL_BLOCK = KVCacheBlock(0)
"""Stands in a block table for a block that no token can see any more. It belongs to no pool; the runner's tables have 0 for it,
which attention does not read."""
NULL_BLOCK.ref_cnt = 1


class PinnedBlocks:
    """A move-only list of blocks: its owner has one reference to each, and returns them exactly once.

    Made by the pool, passed to the transfer, returned to the pool through `HoldReturned`. Other threads read only
    `block_ids`, `rows` and `shapes`.
    """

    __slots__ = ("_blocks", "block_ids", "rows", "shapes")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._blocks: list[KVCacheBlock] | None = list(blocks)
        self.block_ids: tuple[int, ...] = tuple(block.block_id for block in blocks)
        self.rows: tuple[int, ...] = tuple(block.row for block in blocks)
        """Of the tensors of their shapes."""
        self.shapes: tuple[int, ...] = tuple(block.shape for block in blocks)

    def __len__(self) -> int:
        return len(self.block_ids)

    def give_up(self) -> list[KVCacheBlock]:
        """Return the blocks, once. Raises: PoolCorrupt if the hold was given up before."""
        if self._blocks is None:
            raise PoolCorrupt(f"a hold on blocks {self.block_ids} was given up twice")
        blocks, self._blocks = self._blocks, None
        return blocks


class BlockPool:
    """Hands out blocks and finds them again by hash."""

    def __init__(
        self,
        *num_blocks: int,
        enable_caching: bool = True,
        num_host_blocks: BlockCounts = (),
        has_store: bool = False,
        shares_store: bool = False,
    ) -> None:
        """num_blocks: of each shape. enable_caching: False for a pool that finds no block again. num_host_blocks: size of the tier,
        by shape; empty: there is none. has_store: there is a store below it. shares_store: other workers write into it, too."""
        self.tier = HostTier(*num_host_blocks) if num_host_blocks else None
        """Keeps cached blocks that are reused."""
        self.store = StoreTier(self.tier, shares_store) if self.tier is not None and has_store else None
        self.enables_caching = enable_caching
        places = [(shape, row) for shape, count in enumerate(num_blocks) for row in range(count)]
        self.blocks = [KVCacheBlock(block_id, shape, row) for block_id, (shape, row) in enumerate(places)]
        # per shape unused blocks, next to be taken first: free ones, then cached ones from the least recently used
        self._unused: tuple[OrderedDict[int, KVCacheBlock], ...] = tuple(
            OrderedDict((block.block_id, block) for block in self.blocks if block.shape == shape)
            for shape in range(len(num_blocks))
        )
        self._by_hash: dict[bytes, KVCacheBlock] = {}
        # hash -> True if it is known now; only hashes whose state differs from the last `take_changes`
        self._changes: dict[bytes, bool] = {}
        self.num_cached = 0
        """Unused blocks whose content is known."""
        self.num_remembered = 0
        """Blocks that entered the cache since the start."""
        self.num_forgotten = 0
        """Blocks that left it."""

    @property
    def num_total(self) -> int:
        return len(self.blocks)

    @property
    def num_shapes(self) -> int:
        return len(self._unused)

    @property
    def available(self) -> BlockCounts:
        """Blocks that can be allocated: free and cached."""
        return tuple(map(len, self._unused))

    def has(self, *counts: BlockCounts) -> bool:
        """True if as many blocks of each shape can be allocated, all counts together."""
        return all(sum(of_shape) <= len(unused) for unused, *of_shape in zip(self._unused, *counts, strict=True))

    @property
    def num_in_use(self) -> int:
        return len(self.blocks) - sum(self.available)

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block with this hash, in use or cached; None if there is none."""
        return self._by_hash.get(block_hash)

    def allocate(self, count: int, shape: int = 0) -> list[KVCacheBlock]:
        """`count` blocks of unknown content, one reference each. Raises: PoolCorrupt if fewer are available."""
        unused = self._unused[shape]
        if count > len(unused):
            raise PoolCorrupt(f"{count} blocks asked for, {len(unused)} available")
        taken = []
        for _ in range(count):
            _, block = unused.popitem(last=False)
            self.num_cached -= block.block_hash is not None
            self._give_up(block)
            block.ref_cnt = 1
            block.life += 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block but `NULL_BLOCK`."""
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            if block.ref_cnt == 0:
                del self._unused[block.shape][block.block_id]
                self.num_cached -= block.block_hash is not None
            block.ref_cnt += 1

    def release(self, blocks: Sequence[KVCacheBlock], keep: bool = False) -> None:
        """Remove a reference from each block but `NULL_BLOCK`. Later blocks of a sequence are reused first, since a prefix is more
        often shared.

        keep: reuse blocks of unknown content as late as cached ones, since they may be revived.
        """
        for block in reversed(blocks):
            if block is NULL_BLOCK:
                continue
            if block.ref_cnt <= 0:
                raise PoolCorrupt(f"block {block.block_id} released more often than taken")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unused = self._unused[block.shape]
                unused[block.block_id] = block
                if block.block_hash is not None:
                    self.num_cached += 1
                elif not keep:
                    unused.move_to_end(block.block_id, last=False)

    def hold(self, blocks: Sequence[KVCacheBlock]) -> PinnedBlocks:
        """A hold on blocks that are in use, with references of its own. Raises: PoolCorrupt for `NULL_BLOCK`."""
        if NULL_BLOCK in blocks:
            raise PoolCorrupt("a hold on a block that is not there")
        self.touch(blocks)
        return PinnedBlocks(blocks)

    def take_back(self, hold: PinnedBlocks) -> None:
        """End a hold. Raises: PoolCorrupt if it was given up before."""
        self.release(hold.give_up())

    def remember(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make `find(block_hash)` return the block, unless another block has this hash already, or nothing is cached."""
        if self.enables_caching and block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block
            self.num_remembered += 1
            if not self._is_below(block_hash):
                self._change(block_hash, True)

    def _is_below(self, block_hash: bytes) -> bool:
        """True if host memory or the store has it. What is in a shared store is not this worker's: any other one finds it there."""
        in_host = self.tier is not None and block_hash in self.tier
        return in_host or (self.store is not None and not self.store.is_shared and block_hash in self.store)

    def announce_stored(self) -> None:
        """Forget all changes, and note what the store has: of the cache, nothing has been announced yet."""
        self._changes.clear()
        for name in () if self.store is None or self.store.is_shared else self.store.names:
            self._change(name, True)

    def forget_stored(self, names: Iterable[bytes]) -> None:
        """Note that the store has lost blocks that it was known to have."""
        if self.store is None or self.store.is_shared:
            return
        for name in names:
            if name not in self._by_hash and not self._is_below(name):
                self._change(name, False)

    def forget_cached(self, *, keeps_store: bool = False) -> int:
        """Make cached blocks free, and forget those of the tiers; returns the number of the former. keeps_store: not those of the
        store."""
        unused = [block for block in self._by_hash.values() if block.ref_cnt == 0]
        forgotten = dict.fromkeys(() if self.tier is None else self.tier.forget())
        if self.store is not None:
            in_store = self.store.forget(keeps_names=keeps_store)
            forgotten |= dict.fromkeys(() if self.store.is_shared else in_store)
        for block in unused:
            assert block.block_hash is not None
            forgotten[block.block_hash] = None
            del self._by_hash[block.block_hash]
            block.block_hash = None
            self.num_cached -= 1
            self._unused[block.shape].move_to_end(block.block_id, last=False)
        self.num_forgotten += len(unused)
        for block_hash in forgotten:
            if block_hash not in self._by_hash and not self._is_below(block_hash):
                self._change(block_hash, False)
        return len(unused)

    def _give_up(self, block: KVCacheBlock) -> None:
        """Forget a block that is reused; the tier keeps its content."""
        if (block_hash := block.block_hash) is None:
            return
        del self._by_hash[block_hash]
        block.block_hash = None
        self.num_forgotten += 1
        unknown = block_hash if self.tier is None else self.tier.keep(block_hash, block.shape, block.row)
        if self.store is not None:
            if unknown != block_hash:
                self.store.entered_host(block_hash)
            if unknown is not None:
                self.store.left_host(unknown)
        if unknown is not None and unknown not in self._by_hash and not self._is_below(unknown):
            self._change(unknown, False)

    def _change(self, block_hash: bytes, known: bool) -> None:
        if len(block_hash) > BLOCK_HASH_BYTES:
            return  # of another group than 0
        if self._changes.get(block_hash) is (not known):
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = known

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed): hashes that pool or tiers have since the last call, and hashes that none has any more; of group 0."""
        if not self._changes:
            return [], []
        changes, self._changes = self._changes, {}
        return [h for h, known in changes.items() if known], [h for h, known in changes.items() if not known]

    def check(self, references: dict[int, int] | None = None) -> None:
        """Check all bookkeeping. references: block id -> number of sequences and holds that refer to it, if known.

        Raises: PoolCorrupt naming the first block that is wrong.
        """
        for block in self.blocks:
            if (block.ref_cnt == 0) != (block.block_id in self._unused[block.shape]):
                raise PoolCorrupt(f"{block} is in the wrong list")
            if block.block_hash is not None and self._by_hash.get(block.block_hash) is not block:
                raise PoolCorrupt(f"{block} is not where its hash leads")
            if references is not None and references.get(block.block_id, 0) != block.ref_cnt:
                raise PoolCorrupt(f"{block} should have {references.get(block.block_id, 0)} references")
        if self.num_cached != sum(block.ref_cnt == 0 for block in self._by_hash.values()):
            raise PoolCorrupt(f"num_cached is {self.num_cached}, which is not what the blocks say")
        if any(self._by_hash[block_hash].block_hash != block_hash for block_hash in self._by_hash):
            raise PoolCorrupt("a hash leads to a block of another content")


class PinTracker:
    """Records every hold that is given to the transfer side, until it returns."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._out: Counter[int] = Counter()
        self._quarantined: Counter[int] = Counter()

    def out(self, hold: PinnedBlocks) -> PinnedBlocks:
        """Record a hold that is given to the transfer side."""
        self._out.update(hold.block_ids)
        return hold

    def back(self, hold: PinnedBlocks) -> None:
        """Release the references of a returned hold."""
        _take_one_each(self._out, hold.block_ids)
        _take_one_each(self._quarantined, hold.block_ids)
        self._pool.take_back(hold)

    def quarantine(self, block_ids: set[int]) -> None:
        """Mark blocks of an ended request that an unfinished read may still write."""
        self._quarantined.update(block_ids)

    @property
    def num_quarantined(self) -> int:
        return self._quarantined.total()

    def references(self) -> dict[int, int]:
        """Block id -> references by holds; for the pool check."""
        return dict(self._out)


def _take_one_each(counts: Counter[int], block_ids: tuple[int, ...]) -> None:
    for block in block_ids:
        if counts[block] > 1:
            counts[block] -= 1
        else:
            del counts[block]
