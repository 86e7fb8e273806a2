"""`KvEventSubscription`: keeps one worker's blocks in the prefix index, from Redis, or from the worker if Redis fails.

At most one source writes at a time. Each source begins with all blocks, so sources can be changed at any time.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice

import grpc.aio

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.kv_events import MAX_HASHES, KvCacheEvents, KvEventSink, apply_change
from pdserve.common.registry.redis_connection import raise_if_cancelled
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.worker_identity import WorkerIdentity
from pdserve.router.workers.kv_event_stream import ChangeReader, Snapshot
from pdserve.router.workers.watch import watch
from pdserve.router.workers.worker import RemoteWorker

log = logging.getLogger(__name__)

ASK_AFTER_S = 3.0
"""Seconds without valid values in Redis about a worker's blocks after which the router requests them from the worker."""
ASK_AGAIN_S = 0.5


class FeedSource(enum.Enum):
    """Source of a worker's blocks. NONE: the index is unchanged. LOADING: a snapshot from Redis is being written into it."""

    NONE = "none"
    LOADING = "loading"
    REDIS = "redis"
    WORKER = "worker"


class KvEventSubscription:
    """The blocks of one epoch of one worker, from its first report to its end."""

    def __init__(
        self, worker: RemoteWorker, held: KvEventSink, key: DeploymentKey, counts: Counter[str], now_s: float
    ) -> None:
        """counts: kind -> number of invalid values. now_s: the loop's time."""
        self.worker = worker
        self.source = FeedSource.NONE
        self.reader: ChangeReader | None = None
        """Position in the stream, while the source is REDIS."""
        self._held, self._counts, self._key = held, counts, key
        self._confirmed_at = now_s
        self._snapshot_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._last_warning = ""

    def load(self, snapshot: Callable[[], Coroutine[None, None, Snapshot | None]]) -> None:
        """Start loading a snapshot from Redis, unless that has begun or is done."""
        if self.source is not FeedSource.REDIS and not self._is_loading:
            self._snapshot_task = asyncio.create_task(self._load(snapshot))

    @property
    def _is_loading(self) -> bool:
        """True while a snapshot is being loaded; ends by itself if Redis does not answer within 1 s."""
        return self._snapshot_task is not None and not self._snapshot_task.done()

    def take(self, entries: Iterable[tuple[object, object]]) -> bool:
        """Apply the next entries of the stream, if the source is REDIS; False after a gap or an invalid entry."""
        if self.source is not FeedSource.REDIS or self.reader is None:
            return True
        try:
            for change in self.reader.read(entries):
                apply_change(self._held, self.worker.key, change)
        except InvalidRequest as error:
            self.invalidate(error.message)
            return False
        return True

    def confirm(self, seq: int, now_s: float) -> None:
        """Compare with the worker's record, which counts `seq` changes, after all entries were applied."""
        if self.source is FeedSource.REDIS and self.reader is not None:
            if self.reader.seq < seq:
                self.invalidate(f"{seq} changes were made, the stream ends at {self.reader.seq}")
            else:
                self._confirmed_at = now_s
                self._last_warning = ""

    def invalidate(self, cause: str) -> None:
        """Remove this worker's blocks until a source starts again, because values in Redis are invalid."""
        if self.source is FeedSource.REDIS:
            self.source, self.reader = FeedSource.NONE, None
            self._held.cleared(self.worker.key)
        self.warn_once(cause)

    def warn_once(self, cause: str) -> None:
        """Count a cause, and log it unless it equals the last warning."""
        self._counts["blocks"] += 1
        if cause != self._last_warning:
            self._last_warning = cause
            log.warning("the blocks of worker %s in Redis are read again: %s", self.worker, cause)

    def poll(self, now_s: float) -> None:
        """Called several times a second, whether Redis answers or not."""
        if self.source is FeedSource.WORKER:
            if self._watch_task is None or self._watch_task.done():
                self._watch_task = asyncio.create_task(self._watch())
        elif now_s - self._confirmed_at > ASK_AFTER_S and not self._is_loading:
            self._counts["asked_worker"] += 1
            log.warning(
                "Redis has returned nothing valid about worker %s's blocks for %g s: the worker sends them itself",
                self.worker, ASK_AFTER_S,
            )  # fmt: skip
            self.source, self.reader = FeedSource.WORKER, None
            self._watch_task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the subscription, because the worker is lost or the router stops."""
        self.source, self.reader = FeedSource.NONE, None
        tasks = [task for task in (self._snapshot_task, self._watch_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._held.cleared(self.worker.key)

    async def _load(self, snapshot: Callable[[], Coroutine[None, None, Snapshot | None]]) -> None:
        try:
            found = await snapshot()
        except InvalidRequest as error:
            self.warn_once(error.message)
            return
        raise_if_cancelled()
        if found is None:
            return
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
            self._watch_task = None
        self.source = FeedSource.LOADING
        key, rest = self.worker.key, iter(found.hashes)
        self._held.cleared(key)
        while piece := tuple(islice(rest, MAX_HASHES)):
            self._held.stored(key, piece)
            # let requests run first
            await asyncio.sleep(0)
        self.source, self.reader = FeedSource.REDIS, found.reader
        self._confirmed_at = asyncio.get_running_loop().time()
        log.info("worker %s: %d blocks read from Redis", self.worker, len(found.hashes))

    async def _watch(self) -> None:
        """Apply all block events of the worker's watch until the stream breaks."""
        events = watch(self.worker.channel.channel, self._key, str(self.worker), blocks=True)
        try:
            async for event in events:
                if isinstance(event, WorkerIdentity) and event.key != self.worker.key:
                    return
                if isinstance(event, KvCacheEvents):
                    apply_change(self._held, self.worker.key, event)
        except (PdServeError, grpc.aio.UsageError) as error:
            log.info("the block events of worker %s ended: %s", self.worker, error)
        finally:
            await events.aclose()
        await asyncio.sleep(ASK_AGAIN_S)
