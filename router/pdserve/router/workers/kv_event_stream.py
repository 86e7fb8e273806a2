"""Reads one worker's published blocks from Redis: a snapshot, then changes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from redis.asyncio import Redis

from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import MAX_BLOCKS, KvCacheEvents, WorkerKey
from pdserve.common.registry.redis_connection import raise_if_cancelled
from pdserve.common.registry.registry import Keys, read_change, read_entry_id, read_hash

SCAN_COUNT = 1000


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a worker's set of blocks, and the stream's position at the beginning of the scan."""

    reader: ChangeReader
    """Positioned at the last entry before the scan; later entries contain the changes that the scan missed."""
    hashes: frozenset[bytes]


class ChangeReader:
    """A router's position in one stream."""

    def __init__(self, position: str, seq: int) -> None:
        self.position = position
        """The last entry read."""
        self.seq = seq
        """The number of the last change read."""

    def read(self, entries: Iterable[tuple[object, object]]) -> list[KvCacheEvents]:
        """The next changes. Raises: InvalidRequest for a gap or a malformed entry; the caller then starts over."""
        changes: list[KvCacheEvents] = []
        for entry_id, fields in entries:
            position, numbered = read_entry_id(entry_id), read_change(fields)
            if not self.seq < numbered.seq or (numbered.seq != self.seq + 1 and not numbered.change.cleared):
                raise InvalidRequest(f"change {numbered.seq} came where {self.seq + 1} was expected", "events")
            self.position, self.seq = position, numbered.seq
            changes.append(numbered.change)
        return changes


async def read_snapshot(redis: Redis, keys: Keys, worker: WorkerKey) -> Snapshot | None:
    """Read a snapshot; None if the worker has published nothing.

    Raises: InvalidRequest for a malformed value, or too many; `REDIS_ERRORS`.
    """
    last = await redis.xrevrange(keys.events(*worker), count=1)
    if not last:
        return None
    entry_id, fields = last[0]
    reader = ChangeReader(read_entry_id(entry_id), read_change(fields).seq)
    hashes: set[bytes] = set()
    cursor = 0
    while True:
        raise_if_cancelled()
        cursor, members = await redis.sscan(keys.blocks(*worker), cursor, count=SCAN_COUNT)
        hashes.update(map(read_hash, members))
        if len(hashes) > MAX_BLOCKS:
            raise InvalidRequest(f"the set of blocks has more than {MAX_BLOCKS} members", "blocks")
        if not cursor:
            return Snapshot(reader=reader, hashes=frozenset(hashes))
