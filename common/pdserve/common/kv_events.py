"""Events about the blocks that workers hold, by placement hash, and the interface of their receiver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

WorkerKey = tuple[str, int]
"""(worker_id, epoch)."""

MAX_HASHES = 4096
"""In one change; 32 KiB."""


class KvCacheEvents(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the blocks that a worker holds."""

    cleared: bool = False
    """Discard all earlier events; applied first."""
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class KvEventSink(Protocol):
    """Records which worker holds which blocks: the router's `PrefixIndex`."""

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """The worker has these blocks now."""

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """The worker no longer has these; unknown ones are ignored."""

    def cleared(self, worker: WorkerKey) -> None:
        """The worker starts again without blocks, or is lost."""


def apply_change(held: KvEventSink, worker: WorkerKey, change: KvCacheEvents) -> None:
    """Bring `held` up to date with one change of one worker."""
    if change.cleared:
        held.cleared(worker)
    if change.removed:
        held.removed(worker, change.removed)
    if change.stored:
        held.stored(worker, change.stored)
