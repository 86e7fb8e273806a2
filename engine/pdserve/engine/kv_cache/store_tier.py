"""`StoreTier`: which cached blocks lie in a store below host memory. Only the engine thread touches it.

A block is written when it has entered the host-memory tier, from its slot there, which is pinned meanwhile. What has left host
memory before its turn is not written. Blocks are read from the store into the pool; a read may fail, and its block is then unknown
here, too. The store gives up blocks by itself and reports them with the writes that it needs their room for.

Of a store that other workers share it is only known what was looked up, read or written lately: others write into it, and blocks
leave it without a report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.engine.kv_cache.host_tier import HostTier, Slot

MAX_SHARED_NAMES = 1 << 18
"""Names that are remembered of a store that other workers share: 32 MiB."""
MAX_WRITING_SHARE = 0.25
"""Part of the host-memory slots of one shape that writes may pin."""


@dataclass(eq=False)
class StoreTier:
    """The books of one engine's store; the bytes are the executor's (`engine/runner/pool/host_blocks.py`)."""

    _host: HostTier
    is_shared: bool = False
    """True if other workers write into it, too."""
    _names: dict[bytes, None] = field(default_factory=dict, init=False)
    """Of a shared store, last known last."""
    _unwritten: dict[bytes, None] = field(default_factory=dict, init=False)
    """Names of blocks to write, in the order in which they entered host memory."""
    _writes: dict[int, tuple[bytes | None, Slot]] = field(default_factory=dict, init=False)
    """By copy id: name, None if it is forgotten meanwhile, and slot."""
    _num_writing: Counter[int] = field(default_factory=Counter, init=False)
    """Of them, by shape."""
    _clears: bool = field(default=False, init=False)
    num_written: int = field(default=0, init=False)
    """Blocks written since the start."""
    num_read: int = field(default=0, init=False)
    """Blocks read back."""
    num_failed: int = field(default=0, init=False)
    """Blocks that could not be read, or were not what had been written."""
    num_lost: int = field(default=0, init=False)
    """Blocks that the store gave up for others, or could not write."""
    num_hit_tokens: int = field(default=0, init=False)
    """Prompt tokens whose blocks came from here."""
    num_found: int = field(default=0, init=False)
    """Blocks that lookups found."""

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    @property
    def has_writes(self) -> bool:
        """True if writes are under way, or have to begin."""
        return bool(self._writes or self._unwritten)

    @property
    def names(self) -> Collection[bytes]:
        """Of the blocks that are known to be there."""
        return self._names.keys()

    def know(self, names: Iterable[bytes]) -> None:
        """Note blocks that the store has: from before, or as a lookup found."""
        for name in names:
            self._know(name)

    def _know(self, name: bytes) -> None:
        if self.is_shared:
            self._names.pop(name, None)
            if len(self._names) >= MAX_SHARED_NAMES:
                del self._names[next(iter(self._names))]
        self._names[name] = None

    def _lose(self, names: Iterable[bytes]) -> list[bytes]:
        """Forget blocks; returns those that were known."""
        gone = [name for name in names if name in self._names]
        for name in gone:
            del self._names[name]
        return gone

    def entered_host(self, name: bytes) -> None:
        """A block has entered the host-memory tier."""
        if name not in self._names:
            self._unwritten[name] = None

    def left_host(self, name: bytes) -> None:
        """A block has left the host-memory tier."""
        self._unwritten.pop(name, None)

    def take_writes(self, ids: Iterator[int]) -> dict[int, tuple[bytes, Slot]]:
        """Blocks to write from now on, by copy id: name and slot, whose bytes are there once the stores so far have ended."""
        begun: dict[int, tuple[bytes, Slot]] = {}
        while self._unwritten:
            name = next(iter(self._unwritten))
            slot = shape, _ = self._host.slot(name)
            if self._num_writing[shape] >= max(1, int(MAX_WRITING_SHARE * self._host.num_slots[shape])):
                break
            del self._unwritten[name]
            self._host.hold(slot)
            self._num_writing[shape] += 1
            copy_id = next(ids)
            self._writes[copy_id] = begun[copy_id] = (name, slot)
        return begun

    def wrote(self, copy_id: int, lost: Sequence[bytes]) -> list[bytes]:
        """Apply the end of a write. lost: names that the store does not have any more. Returns those that were known here."""
        name, slot = self._writes.pop(copy_id)
        self._num_writing[slot[0]] -= 1
        self._host.unpin([slot])
        if name is not None:
            self._know(name)
        gone = self._lose(dict.fromkeys(lost))
        self.num_written += name is not None and name not in lost
        self.num_lost += len(gone)
        return gone

    def is_writing(self, copy_id: int) -> bool:
        return copy_id in self._writes

    def failed(self, names: Sequence[bytes]) -> list[bytes]:
        """Forget blocks that could not be read; returns those that were known here."""
        gone = self._lose(dict.fromkeys(names))
        self.num_failed += len(gone)
        return gone

    def fell_silent(self) -> None:
        """A shared store has not answered, and may have lost everything: what enters host memory from now on is written again."""
        self._names.clear()

    def forget(self, *, keeps_names: bool = False) -> list[bytes]:
        """Forget what has to be written, since host memory has forgotten it, and unless `keeps_names` every block: the store is
        cleared. Returns their names."""
        self._unwritten.clear()
        if keeps_names:
            return []
        forgotten = list(self._names)
        self._names.clear()
        self._writes = {copy_id: (None, slot) for copy_id, (_, slot) in self._writes.items()}
        self._clears = True
        return forgotten

    def take_clear(self) -> bool:
        """True once after `forget`: the store has to be cleared before what is written from now on."""
        clears, self._clears = self._clears, False
        return clears

    @property
    def pins(self) -> list[Slot]:
        """Slots that writes read."""
        return [slot for _, slot in self._writes.values()]
