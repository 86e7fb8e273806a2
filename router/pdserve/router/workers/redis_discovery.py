"""`RedisDirectory`: finds workers through Redis, and reads the block events that they publish there.

Redis adds workers and never removes them. A poll is one or two round trips, several times per second; no request waits for it.
While Redis is unreachable the index is unchanged, until block events are requested from the workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import KvEventSink, WorkerKey
from pdserve.common.registry.circuit_breaker import CircuitBreaker
from pdserve.common.registry.redis_connection import (
    REDIS_ERRORS,
    concerns_keys,
    error_kind,
    error_text,
    make_redis,
    raise_if_cancelled,
)
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.registry.registry import (
    MAX_WORKERS,
    RECORD_FIELDS,
    Keys,
    RecordSigner,
    WorkerRecord,
    read_record,
    read_worker_id,
)
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.fleet import Discovery
from pdserve.router.workers.kv_event_stream import Snapshot, read_snapshot
from pdserve.router.workers.kv_event_subscription import FeedSource, KvEventSubscription
from pdserve.router.workers.worker import RemoteWorker

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
"""Seconds between polls for block events."""
FIND_EVERY_S = 0.5
"""Seconds between polls for workers."""
FORGET_AFTER_S = 10.0
"""Seconds after which an address without a record and without a live worker is forgotten."""
SNAPSHOTS_AT_ONCE = 4
"""Snapshots that are loaded at the same time; few, so that the first are complete sooner and connections suffice."""
MAX_NEW_ADDRESSES = 64
"""Most new addresses per poll; the next poll continues."""
ENTRIES_AT_ONCE = 64
"""Most entries of one stream per poll."""


class RedisDirectory:
    """Polls Redis for the fleet. Owns the Redis client."""

    def __init__(self, redis: Redis, where: str, namespace: str, held: KvEventSink, key: DeploymentKey) -> None:
        """where: the server's name for the log. held: receives the workers' blocks. key: verifies records."""
        self.breaker = CircuitBreaker(
            f"Redis at {where}", "the router goes on with the workers it knows; it is tried again", log
        )
        self.counts: Counter[str] = Counter(record=0, workers=0, blocks=0, asked_worker=0)
        """Kind (record, workers, blocks) -> invalid values; `asked_worker` -> requests to workers instead."""
        self._redis = redis
        self._keys = Keys(namespace)
        self._held = held
        self._key = key
        self._signer = RecordSigner(key, namespace)
        self._feeds: dict[WorkerKey, KvEventSubscription] = {}
        self._records: dict[str, WorkerRecord] = {}
        self._seen_at: dict[str, float] = {}
        self._find_at = 0.0
        self._snapshots = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)
        self._warnings: dict[str, str] = {}

    async def run(self, fleet: Discovery) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self.breaker.allows:
                    try:
                        await self._look(fleet, loop.time())
                    except REDIS_ERRORS as error:
                        self.breaker.failed(error_kind(error), error_text(error))
                    except Exception:
                        log.exception("polling Redis failed")
                        self.breaker.failed("bug", "the traceback stands above")
                    else:
                        self.breaker.succeeded()
                    raise_if_cancelled()
                await self._poll_subscriptions(fleet.lives(), loop.time())
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await asyncio.gather(*(feed.close() for feed in self._feeds.values()))
            await self._redis.aclose()

    async def _look(self, fleet: Discovery, now_s: float) -> None:
        finding = now_s >= self._find_at
        worker_ids = await self._worker_ids() if finding else []
        following = {
            self._keys.events(*feed.worker.key).encode(): feed
            for feed in self._feeds.values()
            if feed.reader is not None
        }
        # records before streams, so that the stream contains all changes that the record counts
        reading = self._redis.pipeline(transaction=False)
        for worker_id in worker_ids:
            reading.hmget(self._keys.worker(worker_id), list(RECORD_FIELDS))
        if following:
            reading.xread(
                {key: feed.reader.position for key, feed in following.items() if feed.reader}, count=ENTRIES_AT_ONCE
            )
        results = await reading.execute(raise_on_error=False) if worker_ids or following else []
        caught_up = await self._take_entries(following, results[len(worker_ids)]) if following else set()
        if finding:
            self._find_at = now_s + FIND_EVERY_S
            self._take_records(worker_ids, results, now_s)
            self._notify(fleet, now_s)
            self._confirm(caught_up, now_s)

    async def _worker_ids(self) -> list[str]:
        try:
            members = await self._redis.zrevrange(self._keys.workers, 0, MAX_WORKERS - 1)
        except ResponseError as error:
            self._unusable("workers", self._keys.workers, error)
            return list(self._records)
        worker_ids = []
        for member in members:
            try:
                worker_ids.append(read_worker_id(member))
            except InvalidRequest as error:
                self._warn_once("workers", repr(member), f"an id in {self._keys.workers}: {error.message}")
        return worker_ids

    def _take_records(self, worker_ids: Sequence[str], results: Sequence[object], now_s: float) -> None:
        self._records = {}
        for worker_id, result in zip(worker_ids, results, strict=False):
            try:
                if isinstance(result, Exception):
                    self._unusable("record", worker_id, result)
                elif isinstance(result, list) and (record := read_record(worker_id, result)) is not None:
                    self._signer.verify(record)
                    self._records[worker_id] = record
                    self._seen_at[record.address] = now_s
                    self._warnings.pop(f"record {worker_id}", None)
            except InvalidRequest as error:
                self._warn_once("record", worker_id, f"the record of worker {worker_id}: {error.message}")

    async def _take_entries(self, following: Mapping[bytes, KvEventSubscription], result: object) -> set[WorkerKey]:
        """Apply stream entries; returns the workers whose streams were read to the end."""
        found: dict[bytes, list[tuple[object, object]]] = {}
        if isinstance(result, Exception):
            # a foreign value under one key fails the whole command
            await self._find_unreadable(following, result)
            return set()
        if isinstance(result, list):
            found = dict(result)
        caught_up = set()
        for key, feed in following.items():
            entries = found.get(key, [])
            if feed.take(entries) and len(entries) < ENTRIES_AT_ONCE:
                caught_up.add(feed.worker.key)
        return caught_up

    async def _find_unreadable(self, following: Mapping[bytes, KvEventSubscription], error: Exception) -> None:
        if not concerns_keys(error_kind(error)):
            raise error
        asking = self._redis.pipeline(transaction=False)
        for key in following:
            asking.type(key)
        for feed, kind in zip(following.values(), await asking.execute(), strict=True):
            if kind not in (b"stream", b"none"):
                feed.invalidate(f"its stream is a {kind.decode('ascii', 'replace')}")

    def _notify(self, fleet: Discovery, now_s: float) -> None:
        known = set(fleet.introduced())
        num_new = 0
        for record in self._records.values():
            num_new += record.address not in known
            if record.address in known or num_new <= MAX_NEW_ADDRESSES:
                fleet.register(record.address, WorkerRole(record.role))
        introduced = set(fleet.introduced())
        self._seen_at = {address: self._seen_at.get(address, now_s) for address in introduced}
        fleet.forget({address for address, at in self._seen_at.items() if now_s - at > FORGET_AFTER_S})

    def _confirm(self, caught_up: set[WorkerKey], now_s: float) -> None:
        for key, feed in self._feeds.items():
            record = self._records.get(key[0])
            if record is None or record.epoch != key[1]:
                continue
            if key in caught_up:
                feed.confirm(record.seq, now_s)
            if feed.source is not FeedSource.REDIS:
                feed.load(lambda key=key: self._snapshot(key))  # type: ignore[misc]

    async def _snapshot(self, key: WorkerKey) -> Snapshot | None:
        try:
            async with self._snapshots:
                return await read_snapshot(self._redis, self._keys, key)
        except REDIS_ERRORS as error:
            if concerns_keys(error_kind(error)):
                raise InvalidRequest(error_text(error), "blocks") from error
            # the next poll finds the value again, and counts it
            return None

    async def _poll_subscriptions(self, lives: Sequence[RemoteWorker], now_s: float) -> None:
        alive = {worker.key: worker for worker in lives}
        for key in [key for key, feed in self._feeds.items() if alive.get(key) is not feed.worker]:
            await self._feeds.pop(key).close()
        for key, worker in alive.items():
            if key not in self._feeds:
                self._feeds[key] = KvEventSubscription(worker, self._held, self._key, self.counts, now_s)
                # read its blocks at once
                self._find_at = 0.0
            self._feeds[key].poll(now_s)

    def _unusable(self, kind: str, key: str, error: Exception) -> None:
        """Warn of a foreign value under a key of the namespace; raise any other error, which is a failure of Redis."""
        if not concerns_keys(error_kind(error)):
            raise error
        self._warn_once(kind, key, f"{kind} {key} in Redis is unusable: {error_text(error)}")

    def _warn_once(self, kind: str, key: str, message: str) -> None:
        """Count a warning, and log it unless it equals the last one of its key."""
        self.counts[kind] += 1
        if len(self._warnings) > MAX_WORKERS:
            self._warnings.clear()
        if self._warnings.get(f"{kind} {key}") != message:
            self._warnings[f"{kind} {key}"] = message
            log.warning("%s", message)


def make_directory(settings: RouterSettings, held: KvEventSink, key: DeploymentKey) -> RedisDirectory | None:
    """A `RedisDirectory`; None without Redis in the settings. Raises: ConfigError."""
    if settings.redis is None:
        return None
    url = parse_redis_url(settings.redis)
    return RedisDirectory(make_redis(url, settings.redis_ca_file), str(url), settings.redis_namespace, held, key)
