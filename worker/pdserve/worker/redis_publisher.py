"""`RedisPublisher`: keeps this worker's record, and the hashes of its blocks, in Redis.

The worker's state is authoritative. Changes are written in numbered batches, each one MULTI. Every second the worker compares Redis
with the values that it has written, and writes everything again if they differ. No request waits for Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from pdserve.common import clock
from pdserve.common.errors import InvalidRequest
from pdserve.common.kv_events import KvCacheEvents
from pdserve.common.registry.circuit_breaker import FIRST_WAIT_S, CircuitBreaker
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
    BEAT_S,
    BLOCKS_TTL_S,
    EVENTS_KEPT,
    RECORD_FIELDS,
    RECORD_TTL_S,
    WORKERS_TTL_S,
    Keys,
    NumberedChange,
    RecordSigner,
    WorkerRecord,
    layout_fingerprint,
    read_change,
    read_record,
)
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.common.worker_identity import WorkerIdentity
from pdserve.worker.kv_event_publisher import KvEventPublisher, KvEventSubscriber

log = logging.getLogger(__name__)

PUBLISH_EVERY_S = 0.02
"""Seconds between batches; engine steps are shorter, so a batch contains several."""
LEAVE_S = 1.0


class RedisPublisher:
    """Publishes to Redis. `run` it as a task while the worker serves, then `leave`. Owns the Redis client."""

    def __init__(
        self,
        redis: Redis,
        where: str,
        namespace: str,
        record: WorkerRecord,
        cached: KvEventPublisher,
        key: DeploymentKey,
    ) -> None:
        """where: the server's name for the log. record: of this epoch of this worker; its counters are updated here.

        key: signs the record.
        """
        self.breaker = CircuitBreaker(
            f"Redis at {where}", "the worker serves on, and routers that know it keep it; it is tried again", log
        )
        self.num_republished = 0
        """Number of times everything was written again, because Redis differed."""
        self.num_conflicts = 0
        """Number of times the record of this worker's id belonged to another epoch."""
        self._redis = redis
        self._keys = Keys(namespace)
        self._record = record
        self._signer = RecordSigner(key, namespace)
        self._worker_key = self._keys.worker(record.worker_id)
        self._blocks_key = self._keys.blocks(*record.key)
        self._events_key = self._keys.events(*record.key)
        self._cached = cached
        self._published: set[bytes] = set()
        """The intended content of the set in Redis."""
        self._comparable = False
        """True if Redis can be compared: everything has been written, and no batch has an unknown result."""
        self._superseded = False
        """True if a later epoch has the record of this worker's id."""
        self._clean_up = False
        """True if a foreign value was found under one of the keys."""
        self._next_beat = 0.0

    async def run(self) -> None:
        """Publish until cancelled."""
        follower = self._cached.follow()
        try:
            while True:
                await self._until_due(follower)
                if not self.breaker.allows:
                    await asyncio.sleep(FIRST_WAIT_S)
                    continue
                try:
                    await self._turn(follower)
                except REDIS_ERRORS as error:
                    self._failed(error_kind(error), error_text(error), follower)
                except Exception:
                    log.exception("publishing failed")
                    self._failed("bug", "the traceback stands above", follower)
                else:
                    self.breaker.succeeded()
                raise_if_cancelled()
        finally:
            follower.close()

    async def leave(self) -> None:
        """Delete this epoch's values from Redis, within `LEAVE_S`, and close the client."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._delete_record()
                await self._redis.delete(self._blocks_key, self._events_key)
        except REDIS_ERRORS as error:
            log.info("this worker's values could not be deleted from Redis, where they expire: %s", error_text(error))
        with contextlib.suppress(*REDIS_ERRORS):
            await self._redis.aclose()

    async def _until_due(self, follower: KvEventSubscriber) -> None:
        """Wait for a change or the next beat, at least `PUBLISH_EVERY_S`, so that changes are batched."""
        await asyncio.sleep(PUBLISH_EVERY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._next_beat - clock.monotonic())):
                await follower.wait()

    async def _turn(self, follower: KvEventSubscriber) -> None:
        if self._clean_up:
            await self._delete_what_is_not_ours()
            self._clean_up = False
        if clock.monotonic() >= self._next_beat:
            await self._beat(follower)
            self._next_beat = clock.monotonic() + BEAT_S
        for change in follower.take():
            await self._publish(change)

    def counts(self) -> dict[str, int]:
        """Event counts for metrics."""
        return {"republished": self.num_republished, "conflict": self.num_conflicts}

    def _failed(self, kind: str, message: str, follower: KvEventSubscriber) -> None:
        self.breaker.failed(kind, message)
        self._clean_up = self._clean_up or concerns_keys(kind)
        self._next_beat = 0.0
        self._republish(follower)

    def _republish(self, follower: KvEventSubscriber) -> None:
        self._comparable = False
        follower.start_over()

    async def _beat(self, follower: KvEventSubscriber) -> None:
        """Compare, then refresh the record and the keys' expiry."""
        reading = self._redis.pipeline(transaction=False)
        reading.hmget(self._worker_key, list(RECORD_FIELDS))
        reading.scard(self._blocks_key)
        reading.xrevrange(self._events_key, count=1)
        reading.time()
        values, num_blocks, last, (seconds, micros) = await reading.execute()
        now_us = seconds * 1_000_000 + micros
        if not self._record.registered_us:
            self._record = msgspec.structs.replace(self._record, registered_us=now_us)
        stored = self._read_own(values, now_us)
        self._notice_conflict(stored)
        if self._comparable and not self._matches(stored, num_blocks, last):
            self.num_republished += 1
            log.info(
                "Redis differs from what was published there: all %d blocks are published again", len(self._published)
            )
            self._republish(follower)
        writing = self._redis.pipeline(transaction=True)
        self._put_record(writing)
        writing.zadd(self._keys.workers, {self._record.worker_id: seconds})
        writing.zremrangebyscore(self._keys.workers, "-inf", seconds - WORKERS_TTL_S)
        writing.pexpire(self._keys.workers, _ms(WORKERS_TTL_S))
        self._keep_blocks(writing)
        await writing.execute()

    def _read_own(self, values: list[object], now_us: int) -> WorkerRecord | None:
        try:
            stored = read_record(self._record.worker_id, values)
            if stored is not None:
                self._signer.verify(stored)
            if stored is not None and stored.epoch != self._record.epoch and stored.registered_us > now_us:
                raise InvalidRequest(f"registered_us is {stored.registered_us}, which is to come", "registered_us")
            return stored
        except InvalidRequest as error:
            log.warning("the record of this worker in Redis was unusable and is written again: %s", error.message)
            return None

    def _matches(self, stored: WorkerRecord | None, num_blocks: int, last: list[tuple[bytes, object]]) -> bool:
        if num_blocks != len(self._published) or not last:
            return False
        try:
            if read_change(last[0][1]).seq != self._record.seq:
                return False
        except InvalidRequest:
            return False
        # the beat corrects a missing record, or one of another epoch
        return stored is None or stored.epoch != self._record.epoch or stored.seq == self._record.seq

    def _notice_conflict(self, stored: WorkerRecord | None) -> None:
        """Resolve two epochs with one id: the one that registered later has the record."""
        ours = self._record
        if stored is None or (stored.registered_us, stored.epoch) <= (ours.registered_us, ours.epoch):
            # no record, this epoch's, or an earlier epoch's, which has ended or yields when it reads this record
            self._superseded = False
        elif not self._superseded:
            self._superseded = True
            self.num_conflicts += 1
            log.warning(
                "worker id %s is also that of a worker at %s that started later: it has the record in Redis, and this "
                "one at %s is not introduced to further routers; give each worker a --worker-id of its own",
                ours.worker_id, stored.address, ours.address,
            )  # fmt: skip

    async def _publish(self, change: KvCacheEvents) -> None:
        """Write one batch in one MULTI."""
        if change.cleared:
            self._published.clear()
            self._comparable = True
        self._published.difference_update(change.removed)
        self._published.update(change.stored)
        seq = self._record.seq + 1
        # a number is used only once, also if the result of the batch is unknown
        self._record = msgspec.structs.replace(self._record, seq=seq, count=len(self._published))
        writing = self._redis.pipeline(transaction=True)
        if change.cleared:
            writing.delete(self._blocks_key)
        if change.removed:
            writing.srem(self._blocks_key, *change.removed)
        if change.stored:
            writing.sadd(self._blocks_key, *change.stored)
        entry = NumberedChange(seq=seq, change=change)
        writing.xadd(self._events_key, entry.fields(), maxlen=EVENTS_KEPT, approximate=True)
        self._put_record(writing)
        self._keep_blocks(writing)
        await writing.execute()

    def _put_record(self, writing: Pipeline) -> None:
        if not self._superseded:
            writing.hset(self._worker_key, mapping=self._signer.signed(self._record).fields())
            writing.pexpire(self._worker_key, _ms(RECORD_TTL_S))

    def _keep_blocks(self, writing: Pipeline) -> None:
        writing.pexpire(self._blocks_key, _ms(BLOCKS_TTL_S))
        writing.pexpire(self._events_key, _ms(BLOCKS_TTL_S))

    async def _delete_what_is_not_ours(self) -> None:
        """A foreign value under one of the keys: delete the key, and write everything again."""
        asking = self._redis.pipeline(transaction=False)
        asking.type(self._worker_key)
        asking.type(self._keys.workers)
        record_type, workers_type = await asking.execute()
        doomed = [self._blocks_key, self._events_key]
        doomed += [self._worker_key] if record_type not in (b"hash", b"none") else []
        doomed += [self._keys.workers] if workers_type not in (b"zset", b"none") else []
        await self._redis.delete(*doomed)
        log.warning("foreign values stood under this worker's keys in Redis; they are deleted and written anew")

    async def _delete_record(self) -> None:
        async with self._redis.pipeline(transaction=True) as deleting:
            await deleting.watch(self._worker_key)
            epoch = await deleting.hget(self._worker_key, "epoch")
            if epoch != f"{self._record.epoch:016x}".encode():
                return
            deleting.multi()  # type: ignore[no-untyped-call]
            deleting.delete(self._worker_key)
            deleting.zrem(self._keys.workers, self._record.worker_id)
            with contextlib.suppress(WatchError):
                await deleting.execute()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def make_publisher(
    settings: WorkerSettings, identity: WorkerIdentity, cached: KvEventPublisher, key: DeploymentKey
) -> RedisPublisher | None:
    """A `RedisPublisher`; None without Redis in the settings. Raises: ConfigError."""
    if settings.redis is None:
        return None
    url = parse_redis_url(settings.redis)
    record = WorkerRecord(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        registered_us=0,
        role=identity.role_name,
        address=identity.address,
        protocol_version=identity.protocol_version,
        model_fingerprint=identity.layout.model_fingerprint,
        layout_fingerprint=layout_fingerprint(identity.layout),
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
    )
    redis = make_redis(url, settings.redis_ca_file)
    return RedisPublisher(redis, str(url), settings.redis_namespace, record, cached, key)
