"""`HostTier`: which cached blocks lie in host memory, and which of them to give up next. Only the engine thread touches it.

A block enters the tier when the pool reuses a cached one, and remains when it is loaded again: the pool and the tier may both have
it. It leaves when its slot is needed and it is the first of its shape in the order of `UseOrder`. A slot that a load reads is
pinned: it keeps its bytes until the load has ended, however that ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdserve.engine.kv_cache.use_order import UseOrder
from pdserve.engine.sequence_blocks import BlockCounts, RowPairs, pairs_by_shape

Slot = tuple[int, int]
"""The shape of its block, and the row of the tensor that has the slots of this shape."""


class TierCorrupt(RuntimeError):
    """The tier's books do not add up: a bug."""


class HostTier:
    """Name -> slot of a block in host memory; the bytes are the executor's (`engine/runner/pool/host_blocks.py`)."""

    def __init__(self, *num_slots: int) -> None:
        """num_slots: for blocks of each shape."""
        self.num_slots: BlockCounts = num_slots
        self._slots: dict[bytes, Slot] = {}
        self._names = tuple(UseOrder() for _ in num_slots)
        """Per shape the names of its blocks."""
        self._free = tuple([(shape, row) for row in reversed(range(count))] for shape, count in enumerate(num_slots))
        self._pins: Counter[Slot] = Counter()
        """Slot -> loads that read it."""
        self._forgotten: set[Slot] = set()
        """Pinned slots without a name: free when the last load has ended."""
        self._stores: dict[Slot, int] = {}
        """Slot -> row of the block to copy into it, before the next step computes."""
        self.num_queried_tokens = 0
        """Tokens looked up here, since the pool did not have them."""
        self.num_hit_tokens = 0
        self.num_stored = 0
        """Blocks copied into the tier since the start."""
        self.num_loaded = 0
        """Blocks copied back."""
        self.num_evicted = 0
        """Blocks that lost their slot to others."""

    @property
    def num_used(self) -> BlockCounts:
        """Slots with a block, by shape."""
        return tuple(map(len, self._names))

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def keep(self, name: bytes, shape: int, row: int) -> bytes | None:
        """Keep a block that leaves the pool; its bytes are to be copied before it is written again.

        name: with its group, see `with_group_id`. Returns the name that the tier does not have afterwards: of the block that was
        given up for this one, or its own if every slot of the shape is pinned. None if there is no such name.
        """
        names = self._names[shape]
        if name in names:
            names.use(name)
            return None
        evicted = None
        if self._free[shape]:
            slot = self._free[shape].pop()
        else:
            evicted = names.take_first(lambda known: not self._pins[self._slots[known]])
            if evicted is None:
                return name
            slot = self._slots.pop(evicted)
            self.num_evicted += 1
        names.use(name)
        self._slots[name] = slot
        self._stores[slot] = row
        return evicted

    def take_stores(self) -> RowPairs:
        """(row of the block, row of the slot), per shape, of the blocks to copy since the last call; empty without any."""
        if not self._stores:
            return []
        stores, self._stores = self._stores, {}
        self.num_stored += len(stores)
        return pairs_by_shape(len(self.num_slots), ((shape, block, row) for (shape, row), block in stores.items()))

    def slot(self, name: bytes) -> Slot:
        """Of a block that is in the tier."""
        return self._slots[name]

    def hold(self, slot: Slot) -> None:
        """Pin a slot, which is no use of it."""
        self._pins[slot] += 1

    def pin(self, names: Sequence[bytes]) -> list[Slot]:
        """The slots of blocks that are in the tier, each with a pin more, and used now."""
        slots = [self._slots[name] for name in names]
        self._pins.update(slots)
        # the first blocks of a sequence are given up last, as in the pool
        for name, (shape, _) in zip(reversed(names), reversed(slots), strict=True):
            self._names[shape].use(name)
        return slots

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Remove a pin from each slot."""
        for slot in slots:
            if self._pins[slot] > 1:
                self._pins[slot] -= 1
                continue
            del self._pins[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                self._set_free(slot)

    def _set_free(self, slot: Slot) -> None:
        self._free[slot[0]].append(slot)

    def forget(self) -> list[bytes]:
        """Forget every block; returns their names. A slot that a load reads is free when the load has ended."""
        forgotten = list(self._slots)
        for slot in self._slots.values():
            if self._pins[slot]:
                self._forgotten.add(slot)
            else:
                self._set_free(slot)
        self._slots.clear()
        for names in self._names:
            names.clear()
        self._stores.clear()
        return forgotten

    def check(self, pins: Counter[Slot]) -> None:
        """Check all bookkeeping. pins: slot -> loads under way that read it. Raises: TierCorrupt."""
        for shape, count in enumerate(self.num_slots):
            used = [self._slots[name] for name in self._names[shape] if name in self._slots]
            forgotten = [slot for slot in self._forgotten if slot[0] == shape]
            if sorted([*used, *self._free[shape], *forgotten]) != [(shape, row) for row in range(count)]:
                raise TierCorrupt(
                    f"{len(used)} slots of shape {shape} are in use, {len(self._free[shape])} free and {len(forgotten)} "
                    f"forgotten, of {count}"
                )
        if len(self._slots) != sum(self.num_used):
            raise TierCorrupt(
                f"{len(self._slots)} blocks have slots, {sum(self.num_used)} have a place in an order of use"
            )
        if +self._pins != +pins:
            raise TierCorrupt(f"slots {sorted(+self._pins)} are pinned, loads read {sorted(+pins)}")
        if not self._forgotten <= set(+self._pins):
            raise TierCorrupt("a forgotten slot is not free although no load reads it")
