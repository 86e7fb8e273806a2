"""Events about the blocks that workers hold, by placement hash, and the interface of their receiver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from pdserve.common.errors import InvalidRequest

WorkerKey = tuple[str, int]
"""(worker_id, epoch)."""

MAX_HASHES = 4096
"""In one change; 32 KiB."""
MAX_BLOCKS = 1 << 22
"""Blocks of one worker, at most."""


class KvCacheEvents(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the blocks that a worker holds."""

    cleared: bool = False
    """Discard all earlier events; applied first."""
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class KvEventSink(Protocol):
    """Records which worker holds which blocks: the router's `PrefixIndex`."""

    def num_blocks(self, worker: WorkerKey) -> int:
        """Blocks that the worker has."""

    def stored(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """The worker has these blocks now."""

    def removed(self, worker: WorkerKey, hashes: Iterable[bytes]) -> None:
        """The worker no longer has these; unknown ones are ignored."""

    def cleared(self, worker: WorkerKey) -> None:
        """The worker starts again without blocks, or is lost."""


def apply_change(held: KvEventSink, worker: WorkerKey, change: KvCacheEvents) -> None:
    """Bring `held` up to date with one change of one worker.

    Raises: InvalidRequest for a worker that has more than `MAX_BLOCKS` now; all of its blocks are then removed.
    """
    if change.cleared:
        held.cleared(worker)
    if change.removed:
        held.removed(worker, change.removed)
    if change.stored:
        held.stored(worker, change.stored)
        if held.num_blocks(worker) > MAX_BLOCKS:
            held.cleared(worker)
            raise InvalidRequest(f"worker {worker[0]} reports more than {MAX_BLOCKS} blocks", "blocks")
