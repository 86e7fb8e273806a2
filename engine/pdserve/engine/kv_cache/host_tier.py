"""`HostTier`: which cached blocks lie in host memory, and which of them to give up next. Only the engine thread touches it.

A block enters the tier when the pool reuses a cached one, and remains when it is loaded again: the pool and the tier may both have
it. It leaves when its slot is needed and it is the one used least recently. A slot that a load reads is pinned: it keeps its bytes
until the load has ended, however that ends.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence


class TierCorrupt(RuntimeError):
    """The tier's books do not add up: a bug."""


class HostTier:
    """Hash -> slot of a block in host memory; the bytes are the executor's (`engine/runner/pool/host_blocks.py`)."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        """Slot -> loads that read it."""
        self._forgotten: set[int] = set()
        """Pinned slots without a hash: free when the last load has ended."""
        self._stores: dict[int, int] = {}
        """Slot -> block to copy into it, before the next step computes."""
        self.num_queried_tokens = 0
        """Tokens looked up here, since the pool did not have them."""
        self.num_hit_tokens = 0
        self.num_stored = 0
        """Blocks copied into the tier since the start."""
        self.num_loaded = 0
        """Blocks copied back."""
        self.num_evicted = 0
        """Blocks that lost their slot to others."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def keep(self, block_hash: bytes, block_id: int) -> bytes | None:
        """Keep a block that leaves the pool; its bytes are to be copied before it is written again.

        Returns the hash that the tier does not have afterwards: of the block that was given up for this one, or its own if every
        slot is pinned. None if there is no such hash.
        """
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        evicted = None
        if self._free:
            slot = self._free.pop()
        else:
            evicted = next((known for known, slot in self._slots.items() if not self._pins[slot]), None)
            if evicted is None:
                return block_hash
            slot = self._slots.pop(evicted)
            self.num_evicted += 1
        self._slots[block_hash] = slot
        self._stores[slot] = block_id
        return evicted

    def take_stores(self) -> list[tuple[int, int]]:
        """(block id, slot) of the blocks to copy since the last call."""
        stores, self._stores = self._stores, {}
        self.num_stored += len(stores)
        return [(block_id, slot) for slot, block_id in stores.items()]

    def pin(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The slots of blocks that are in the tier, each with a pin more, and used now."""
        slots = [self._slots[block_hash] for block_hash in block_hashes]
        self._pins.update(slots)
        # the first blocks of a sequence are given up last, as in the pool
        for block_hash in reversed(block_hashes):
            self._slots.move_to_end(block_hash)
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Remove a pin from each slot."""
        for slot in slots:
            if self._pins[slot] > 1:
                self._pins[slot] -= 1
                continue
            del self._pins[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                self._free.append(slot)

    def forget(self) -> list[bytes]:
        """Forget every block; returns their hashes. A slot that a load reads is free when the load has ended."""
        hashes = list(self._slots)
        for slot in self._slots.values():
            if self._pins[slot]:
                self._forgotten.add(slot)
            else:
                self._free.append(slot)
        self._slots.clear()
        self._stores.clear()
        return hashes

    def check(self, pins: Counter[int]) -> None:
        """Check all bookkeeping. pins: slot -> loads under way that read it. Raises: TierCorrupt."""
        slots = sorted([*self._slots.values(), *self._free, *self._forgotten])
        if slots != list(range(self.num_slots)):
            raise TierCorrupt(f"{len(slots)} slots are free, in use or forgotten, of {self.num_slots}")
        if +self._pins != +pins:
            raise TierCorrupt(f"slots {sorted(+self._pins)} are pinned, loads read {sorted(+pins)}")
        if not self._forgotten <= set(+self._pins):
            raise TierCorrupt("a forgotten slot is not free although no load reads it")
