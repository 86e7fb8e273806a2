"""`KvEventPublisher`: placement hashes of the blocks in this worker's prefix cache, and subscribers to their changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice

from pdserve.common.block_hash import placement_hash
from pdserve.common.kv_events import MAX_HASHES, KvCacheEvents


class KvEventPublisher:
    """A copy of the prefix cache's hashes in the asyncio thread, at most one step old."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self._followers: set[KvEventSubscriber] = set()

    def apply(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Apply the changes of an engine step, by block hash."""
        stored, removed = set(map(placement_hash, stored)), set(map(placement_hash, removed))
        self.hashes -= removed
        self.hashes |= stored
        for follower in self._followers:
            follower.note(stored, removed)

    def follow(self) -> KvEventSubscriber:
        """A new subscriber, whose first change is the current content. It must be closed."""
        follower = KvEventSubscriber(self)
        self._followers.add(follower)
        return follower

    def leave(self, follower: KvEventSubscriber) -> None:
        """Remove a subscriber. May be called again."""
        self._followers.discard(follower)


class KvEventSubscriber:
    """Collects changes until they are taken. A slow subscriber gets fewer and larger changes.

    It keeps at most about twice the number of cached blocks; above that it starts over with a snapshot.
    """

    def __init__(self, cached: KvEventPublisher) -> None:
        self._cached = cached
        self._changed = asyncio.Event()
        self._pending: dict[bytes, bool] = {}
        self.start_over()

    def start_over(self) -> None:
        """Make the next change a snapshot: `cleared`, and the whole content."""
        self._cleared = True
        self._pending = dict.fromkeys(self._cached.hashes, True)
        self._changed.set()

    def note(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Called by `KvEventPublisher`."""
        self._pending.update(dict.fromkeys(removed, False))
        self._pending.update(dict.fromkeys(stored, True))
        self._changed.set()
        if len(self._pending) > 2 * len(self._cached.hashes) + MAX_HASHES:
            self.start_over()

    async def wait(self) -> None:
        """Wait until there is a change to take."""
        await self._changed.wait()

    def take(self) -> list[KvCacheEvents]:
        """Changes since the last call, in pieces of at most `MAX_HASHES`; empty if there are none."""
        pending, self._pending = self._pending, {}
        cleared, self._cleared = self._cleared, False
        self._changed.clear()
        changes = [
            KvCacheEvents(
                stored=tuple(h for h in piece if pending[h]), removed=tuple(h for h in piece if not pending[h])
            )
            for piece in _pieces(pending)
        ]
        return [KvCacheEvents(cleared=True), *changes] if cleared else changes

    def close(self) -> None:
        """Stop collecting."""
        self._cached.leave(self)


def _pieces(hashes: Iterable[bytes]) -> Iterator[list[bytes]]:
    rest = iter(hashes)
    while piece := list(islice(rest, MAX_HASHES)):
        yield piece
