"""`FleetUsage`: shares each tenant's use among the routers of a fleet through Redis, so that limits apply to the fleet.

    {ns}:routers        sorted set   router ids, by their last refresh
    {ns}:usage:<id>     hash         field `usage`: one router's numbers; expires `LEASE_S` after the last refresh

Each router writes its own numbers and reads those of the other routers, in one round trip every `BEAT_S`; no request waits for it.
Numbers that were not refreshed for `LEASE_S`, by the reader's clock, no longer count, so the use of an ended router expires. Values
have a MAC under a sub-key of the deployment key, and the time at which they were sealed: other clients of Redis can withhold
numbers, but not change them, nor have those of a router that left count again. Tenants are named by digests.

While Redis is unreachable, each router applies the limits to its own use.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Annotated

import msgspec
from redis.asyncio import Redis

from pdserve.common import clock
from pdserve.common.registry.circuit_breaker import CircuitBreaker
from pdserve.common.registry.redis_connection import (
    REDIS_ERRORS,
    error_kind,
    error_text,
    make_redis,
    raise_if_cancelled,
)
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.registry.registry import Keys
from pdserve.common.security.call_proof import MAX_SKEW_S
from pdserve.common.security.deployment_key import USAGE, DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.tenants.tenant_account import NOWHERE, TenantAccount, TenantAccounts, UsedElsewhere
from pdserve.router.tenants.tenant_digest import tenant_digest

log = logging.getLogger(__name__)

BEAT_S = 0.25
LEASE_S = 3.0
MAX_ROUTERS = 64
"""Routers that are read, the most recently refreshed first."""
MAX_TENANTS = 8192
"""Most tenants in one router's numbers."""
MAX_BYTES = 1 << 20
MAX_AGE_S = MAX_SKEW_S
"""Seconds by which the time in a report may differ from this router's clock: its age, and the difference of two clocks."""
MAX_REMEMBERED = 4096
"""Routers whose last beat is remembered; each has sealed a report within `MAX_AGE_S`."""
_MAC_BYTES = 16
_FIELD = "usage"
_ID_BYTES = 16


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Tokens = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class _Numbers(msgspec.Struct, array_like=True):
    """Use of one tenant in one router."""

    num_sequences: _Count
    num_waiting: _Count
    num_sessions: _Count
    tokens_used: _Tokens
    """Tokens since the router's start."""


class _Report(msgspec.Struct):
    """The numbers that one router publishes."""

    beat: int
    """Counts up from 1 in one run of a router, so that a replayed older value is detected."""
    tenants: dict[str, _Numbers]
    """Tenant digest in hexadecimal -> its numbers."""
    unix_s: float = 0.0
    """Time at which it was sealed, seconds since 1970, by its router's clock. 0 from a version without: it counts as old."""


class _Peer(msgspec.Struct):
    """Another router's last numbers."""

    report: _Report
    at_s: float
    """Time at which its beat last increased, by this router's monotonic clock."""


class FleetUsage:
    """Publishes and reads use for a router with keys and Redis. `run` it until cancelled."""

    def __init__(
        self,
        redis: Redis,
        where: str,
        namespace: str,
        key: DeploymentKey,
        accounts: TenantAccounts,
        *,
        clock: Callable[[], float] = clock.monotonic,
        wall_clock: Callable[[], float] = clock.unix_s,
    ) -> None:
        """where: the server's name for the log. accounts: this router's accounts, to publish. clock: monotonic, seconds.
        wall_clock: seconds since 1970."""
        self.breaker = CircuitBreaker(
            f"Redis at {where}, for limits of tenants,", "limits hold for each router by itself; it is tried again", log
        )
        self.router_id = secrets.token_hex(_ID_BYTES)
        self._redis = redis
        self._keys = Keys(namespace)
        self._key = key
        self._accounts = accounts
        self._clock = clock
        self._wall_clock = wall_clock
        self._beats: dict[str, tuple[int, float]] = {}
        """Router id -> its last beat and when it came, by the wall clock; also of routers that have left, oldest first."""
        self._beat = 0
        self._ids: list[str] = []
        self._peers: dict[str, _Peer] = {}
        self._elsewhere: dict[str, UsedElsewhere] = {}
        self._digests: dict[str, str] = {}
        accounts.elsewhere = self.elsewhere

    def elsewhere(self, tenant: str) -> UsedElsewhere:
        """Total use of a tenant in the other routers."""
        return self._elsewhere.get(self._digest(tenant), NOWHERE) if self._elsewhere else NOWHERE

    async def run(self) -> None:
        """Write and read until cancelled, then remove this router's numbers."""
        try:
            while True:
                if self.breaker.allows:
                    try:
                        await self.exchange()
                    except REDIS_ERRORS as error:
                        self.breaker.failed(error_kind(error), error_text(error))
                    else:
                        self.breaker.succeeded()
                    raise_if_cancelled()
                self._expire()
                await asyncio.sleep(BEAT_S)
        finally:
            await self._leave()

    async def exchange(self) -> None:
        """One round trip. Raises: one of `REDIS_ERRORS`."""
        self._beat += 1
        mine = self._keys.usage(self.router_id)
        trip = self._redis.pipeline(transaction=False)
        trip.zadd(self._keys.routers, {self.router_id: clock.unix_s()})
        trip.hset(mine, _FIELD, self._sealed(_Report(self._beat, self._own(), self._wall_clock()), self.router_id))
        trip.pexpire(mine, int(LEASE_S * 1000))
        trip.zremrangebyscore(self._keys.routers, 0, clock.unix_s() - 60)
        trip.zrevrange(self._keys.routers, 0, MAX_ROUTERS - 1)
        for router_id in self._ids:
            trip.hmget(self._keys.usage(router_id), [_FIELD])
        results = await trip.execute()
        ids, values = results[4], results[5:]
        for router_id, [value] in zip(self._ids, values, strict=True):
            self._take(router_id, value)
        self._ids = [text for member in ids if (text := _router_id(member)) and text != self.router_id]
        self._expire()

    def _own(self) -> dict[str, _Numbers]:
        reported = [(tenant, account) for tenant, account in self._accounts.items() if _is_worth_reporting(account)]
        return {
            self._digest(tenant): _Numbers(
                account.num_sequences, account.num_waiting, account.num_sessions, account.tokens_used
            )
            for tenant, account in reported[:MAX_TENANTS]
        }

    def _take(self, router_id: str, value: bytes | None) -> None:
        report = self._unsealed(value, router_id) if value is not None else None
        if report is None:
            return
        now_s = self._wall_clock()
        last_beat, _ = self._beats.get(router_id, (0, 0.0))
        # a time that is no number is old, too
        if report.beat <= last_beat or not abs(now_s - report.unix_s) <= MAX_AGE_S:
            return
        self._remember(router_id, report.beat, now_s)
        before = self._peers.get(router_id)
        for tenant, account in self._accounts.items():
            digest = self._digest(tenant)
            if before is not None and (now := report.tenants.get(digest)) is not None:
                was = before.report.tenants.get(digest)
                account.spend_elsewhere(now.tokens_used - (was.tokens_used if was is not None else 0.0))
        self._peers[router_id] = _Peer(report, self._clock())

    def _remember(self, router_id: str, beat: int, now_s: float) -> None:
        """Keep a beat for as long as an older report of its router could pass for a new one."""
        self._beats.pop(router_id, None)
        self._beats[router_id] = beat, now_s
        for known, (_, seen_s) in list(self._beats.items()):
            if abs(now_s - seen_s) <= 2 * MAX_AGE_S + LEASE_S and len(self._beats) <= MAX_REMEMBERED:
                break
            del self._beats[known]

    def _expire(self) -> None:
        """Sum the numbers of routers whose lease has not expired."""
        now = self._clock()
        self._peers = {name: peer for name, peer in self._peers.items() if now - peer.at_s < LEASE_S}
        sums: dict[str, UsedElsewhere] = {}
        for peer in self._peers.values():
            for digest, numbers in peer.report.tenants.items():
                before = sums.get(digest, NOWHERE)
                sums[digest] = UsedElsewhere(
                    num_sequences=before.num_sequences + numbers.num_sequences,
                    num_waiting=before.num_waiting + numbers.num_waiting,
                    num_sessions=before.num_sessions + numbers.num_sessions,
                )
        self._elsewhere = sums

    async def _leave(self) -> None:
        try:
            if self.breaker.allows:
                await self._redis.delete(self._keys.usage(self.router_id))
                await self._redis.zrem(self._keys.routers, self.router_id)
        except REDIS_ERRORS:
            log.debug("this router's numbers stay in Redis until their lease ends")
        await self._redis.aclose()

    def _digest(self, tenant: str) -> str:
        if tenant not in self._digests:
            self._digests[tenant] = tenant_digest(self._key, tenant).hex()
        return self._digests[tenant]

    def _mac(self, router_id: str, content: bytes) -> bytes:
        key = self._key.derive(USAGE, router_id.encode())
        return hashlib.blake2b(content, key=key, digest_size=_MAC_BYTES).digest()

    def _sealed(self, report: _Report, router_id: str) -> bytes:
        content = msgspec.msgpack.encode(report)
        return self._mac(router_id, content) + content

    def _unsealed(self, value: bytes, router_id: str) -> _Report | None:
        """Decode a value; None if no router of this deployment wrote it for this id."""
        content = value[_MAC_BYTES:]
        if len(value) > MAX_BYTES or not hmac.compare_digest(value[:_MAC_BYTES], self._mac(router_id, content)):
            return None
        try:
            return msgspec.msgpack.decode(content, type=_Report)
        except msgspec.DecodeError:
            # from another version
            return None


def _is_worth_reporting(account: TenantAccount) -> bool:
    return bool(account.num_sequences or account.num_sessions or account.tokens_used)


def _router_id(member: bytes) -> str:
    """The router id of a member; "" if it is invalid."""
    text = member.decode("ascii", "replace")
    is_id = len(text) == 2 * _ID_BYTES and all(digit in "0123456789abcdef" for digit in text)
    return text if is_id else ""


def make_fleet_usage(settings: RouterSettings, key: DeploymentKey, accounts: TenantAccounts) -> FleetUsage | None:
    """A `FleetUsage`; None without keys or without Redis. Raises: ConfigError."""
    if settings.redis is None or not settings.asks_for_keys:
        return None
    url = parse_redis_url(settings.redis)
    return FleetUsage(make_redis(url, settings.redis_ca_file), str(url), settings.redis_namespace, key, accounts)
