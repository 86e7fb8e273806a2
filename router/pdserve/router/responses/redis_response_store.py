"""`RedisResponseStore`: stored responses that all routers of a deployment share.

    {ns}:response:<tenant>:<id>  string       one response, sealed; expires `max_stored_response_age_s` after it ended
    {ns}:responses:<tenant>      sorted set   `<bytes>:<id>` of the tenant's responses, by the time of their end

Values are encrypted and authenticated (AES-GCM) under a sub-key of the deployment key for each tenant and id: other clients of
Redis can neither read nor change them. Values are bound to tenant and id and carry their expiry, so copied or replayed ones fail
authentication or have expired.

Other clients may write values and members of any size: reading a value ends at `max_stored_response_bytes`, and an index that
takes more memory than its members need is deleted unread.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import Redis

from pdserve.common import clock
from pdserve.common.errors import PeerError
from pdserve.common.registry.circuit_breaker import CircuitBreaker
from pdserve.common.registry.redis_connection import (
    MAX_CONNECTIONS,
    REDIS_ERRORS,
    concerns_keys,
    error_kind,
    error_text,
    make_redis,
    raise_if_cancelled,
)
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.registry.registry import Keys
from pdserve.common.security.deployment_key import STORED_RESPONSES, DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.bodies.body_thread import BodyThread
from pdserve.router.responses.response_store import (
    MemoryResponseStore,
    ResponseStore,
    StoredResponse,
    is_stored,
    most_bytes,
)
from pdserve.router.tenants.tenant_digest import tenant_digest

log = logging.getLogger(__name__)

T = TypeVar("T")
_NONCE_BYTES = 12
_SEALED_BYTES = 128
"""Bytes that a sealed response has in addition to its content, at most."""
_PART_BYTES = 256 << 10
"""Bytes of a value that are read in one round trip, between which the event loop serves others."""
_MEMBER_BYTES = 256
"""Bytes of memory that Redis needs for a member of an index, at most."""
_SPARE_MEMBERS = 2048
"""Members beyond those that are read: of other routers' puts, and of limits that were lowered."""
_MEMBER = re.compile(rb"([0-9]{1,12}):(resp_[0-9a-f]{32})")


class _Content(StoredResponse, frozen=True):
    """A value before it is sealed."""

    expires_unix_s: float


class RedisResponseStore:
    """`close` it."""

    def __init__(
        self,
        redis: Redis,
        where: str,
        key: DeploymentKey,
        settings: RouterSettings,
        *,
        clock: Callable[[], float] = clock.unix_s,
    ) -> None:
        """where: the server's name for the log. clock: seconds since 1970, about the same in all routers."""
        self.breaker = CircuitBreaker(
            f"Redis at {where}, for stored responses,", "none is stored or found; it is tried again", log
        )
        self._redis = redis
        self._key = key
        self._keys = Keys(settings.redis_namespace)
        self._settings = settings
        self._clock = clock
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._thread = BodyThread("stored-responses")

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        value = await self._reached(lambda: self._read(self._name(tenant, response_id)))
        if not value:
            return None
        return await self._thread.run(len(value), lambda: self._unsealed(tenant, response_id, value))

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        if not is_stored(stored, self._settings):
            return
        value = await self._thread.run(stored.num_bytes, lambda: self._sealed(tenant, response_id, stored))
        try:
            await self._reached(lambda: self._put(tenant, response_id, stored, value))
        except PeerError:
            log.debug("response %s is not stored", response_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        stored = await self.get(tenant, response_id)
        if stored is None:
            return False
        trip = self._redis.pipeline(transaction=False)
        trip.delete(self._name(tenant, response_id))
        trip.zrem(self._index(tenant), _member(response_id, stored))
        await self._reached(trip.execute)
        return True

    async def close(self) -> None:
        self._thread.close()
        await self._redis.aclose()

    async def _read(self, name: str) -> bytes:
        """A value; empty if there is none, or none that is small enough. Raises: one of `REDIS_ERRORS`."""
        value, most = bytearray(), most_bytes(self._settings) + _SEALED_BYTES
        while True:
            part = await self._redis.getrange(name, len(value), len(value) + _PART_BYTES - 1)
            if not isinstance(part, bytes) or len(value) + len(part) > most:
                return b""
            value += part
            if len(part) < _PART_BYTES:
                return bytes(value)

    async def _put(self, tenant: str, response_id: str, stored: StoredResponse, value: bytes) -> None:
        """Store, and drop the tenant's oldest beyond its limits. Raises: one of `REDIS_ERRORS`."""
        settings, index, now = self._settings, self._index(tenant), self._clock()
        age_ms = max(1, int(settings.limits.max_stored_response_age_s * 1000))
        most_members = 2 * settings.limits.max_stored_responses_per_tenant + 1
        trip = self._redis.pipeline(transaction=False)
        trip.set(self._name(tenant, response_id), value, px=age_ms)
        trip.zremrangebyscore(index, 0, now - settings.limits.max_stored_response_age_s)
        trip.memory_usage(index, samples=0)
        used_bytes: int | None = (await trip.execute())[-1]
        trip = self._redis.pipeline(transaction=False)
        if (used_bytes or 0) > _MEMBER_BYTES * (most_members + _SPARE_MEMBERS):
            log.warning("an index of stored responses has %d bytes: others write there; it is deleted", used_bytes)
            trip.delete(index)
        trip.zadd(index, {_member(response_id, stored): now})
        trip.pexpire(index, age_ms)
        trip.zrevrange(index, 0, most_members - 1)
        members: list[bytes] = (await trip.execute())[-1]
        dropped, num_kept, num_bytes = list[bytes](), 0, 0
        for member in members:
            match = _MEMBER.fullmatch(member)
            num_bytes += int(match[1]) if match else 0
            if (
                match is None
                or num_kept >= settings.limits.max_stored_responses_per_tenant
                or num_bytes > settings.limits.max_stored_bytes_per_tenant
            ):
                dropped.append(member)
            else:
                num_kept += 1
        if dropped:
            trip = self._redis.pipeline(transaction=False)
            trip.zrem(index, *dropped)
            names = [
                self._name(tenant, match[2].decode()) for member in dropped if (match := _MEMBER.fullmatch(member))
            ]
            if names:
                trip.delete(*names)
            await trip.execute()

    async def _reached(self, trip: Callable[[], Awaitable[T]]) -> T:
        """Result of a round trip. Raises: PeerError."""
        if not self.breaker.allows:
            raise self._unreachable()
        try:
            async with self._connections:
                result = await trip()
        except REDIS_ERRORS as error:
            kind = error_kind(error)
            if not concerns_keys(kind):
                self.breaker.failed(kind, error_text(error))
            raise self._unreachable() from None
        raise_if_cancelled()
        self.breaker.succeeded()
        return result

    def _unreachable(self) -> PeerError:
        return PeerError("the store of responses cannot be reached; try again later").for_clients()

    def _index(self, tenant: str) -> str:
        return self._keys.responses(tenant_digest(self._key, tenant).hex())

    def _name(self, tenant: str, response_id: str) -> str:
        return self._keys.response(tenant_digest(self._key, tenant).hex(), response_id)

    def _cipher(self, tenant: str, response_id: str) -> AESGCM:
        # ids have a fixed length, so that no other pair has this context
        return AESGCM(self._key.derive(STORED_RESPONSES, f"{response_id}{tenant}".encode()))

    def _sealed(self, tenant: str, response_id: str, stored: StoredResponse) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        expires_unix_s = self._clock() + self._settings.limits.max_stored_response_age_s
        content = _Content(stored.response, stored.items, stored.num_input, expires_unix_s)
        return nonce + self._cipher(tenant, response_id).encrypt(nonce, msgspec.msgpack.encode(content), None)

    def _unsealed(self, tenant: str, response_id: str, value: bytes) -> StoredResponse | None:
        """The response in a value; None if no router of this deployment wrote it for this tenant and id, or if it has expired."""
        try:
            content = self._cipher(tenant, response_id).decrypt(value[:_NONCE_BYTES], value[_NONCE_BYTES:], None)
            read = msgspec.msgpack.decode(content, type=_Content)
        except (InvalidTag, ValueError):
            # ValueError: too short, or from another version
            return None
        if self._clock() >= read.expires_unix_s:
            return None
        return StoredResponse(read.response, read.items, read.num_input)


def _member(response_id: str, stored: StoredResponse) -> str:
    return f"{stored.num_bytes}:{response_id}"


def make_response_store(settings: RouterSettings, key: DeploymentKey) -> ResponseStore:
    """The store that the settings ask for. Raises: ConfigError."""
    if settings.redis is None:
        return MemoryResponseStore(settings)
    url = parse_redis_url(settings.redis)
    return RedisResponseStore(make_redis(url, settings.redis_ca_file), str(url), key, settings)
