"""What workers publish about the blocks they hold, by placement hash, as values, and the interface of whoever listens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

WorkerKey = tuple[str, int]
"""(worker_id, epoch): one life of one worker."""

MAX_HASHES = 4096
"""In one change; 32 KiB."""


class KvCacheEvents(msgspec.Struct, frozen=True, kw_only=True):
    """One step from what a worker held to what it holds."""

    cleared: bool = False
    """Nothing said before counts any more; applied first."""
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class KvEventSink(Protocol):
    """Keeps which worker holds which blocks; the router's `PrefixIndex`."""

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """The worker has these blocks now."""

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """The worker has these no more; unknown ones are nothing."""

    def cleared(self, worker: WorkerKey) -> None:
        """The worker begins anew, or is gone."""


def apply_change(held: KvEventSink, worker: WorkerKey, change: KvCacheEvents) -> None:
    """Bring `held` up to date with one change of one worker."""
    if change.cleared:
        held.cleared(worker)
    if change.removed:
        held.removed(worker, change.removed)
    if change.stored:
        held.stored(worker, change.stored)
