"""Stored responses: limits per tenant, in memory and in a real Redis; what others do to the values in Redis."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError, PeerError
from pdserve.common.registry.redis_connection import make_redis
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.responses.redis_response_store import RedisResponseStore
from pdserve.router.responses.response_store import MemoryResponseStore, ResponseStore, StoredResponse
from pdserve.router.tenants.tenant_digest import tenant_digest
from tests.support.engine.settings_with import settings_with
from tests.support.processes.redis_server import RedisServer, redis_server
from tests.support.run.loop_watch import LOOP_S, watched
from tests.support.run.process_memory import TracedMemory

KEY = DeploymentKey(b"0123456789abcdef")


def response_id(number: int) -> str:
    return f"resp_{number:032x}"


def stored(num_bytes: int = 10, mark: int = 0) -> StoredResponse:
    return StoredResponse(b'{"a": %d}' % mark, b"[" + b" " * num_bytes + b"]", 1)


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


class Stores:
    """Makes stores of one kind, which share a clock and, in Redis, their content."""

    def __init__(self, server: RedisServer | None) -> None:
        self.clock = Clock()
        self.server = server
        self.made: list[ResponseStore] = []

    def __call__(self, key: DeploymentKey = KEY, **settings: Any) -> Any:
        limits = settings_with(RouterSettings, **settings)
        limits.verify()
        if self.server is None:
            store: Any = MemoryResponseStore(limits, self.clock)
        else:
            redis = make_redis(parse_redis_url(self.server.url))
            store = RedisResponseStore(redis, "test", key, limits, clock=self.clock)
        self.made.append(store)
        return store


@pytest.fixture(params=["memory", "redis"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    server = request.getfixturevalue("server") if request.param == "redis" else None
    if server is not None:
        server.do("FLUSHALL")
    made = Stores(server)
    yield made
    for store in made.made:
        await store.close()


async def found(store: ResponseStore, tenant: str, numbers: range) -> list[int]:
    return [number for number in numbers if await store.get(tenant, response_id(number)) is not None]


async def test_a_response_is_found_by_its_tenant_alone(stores: Stores) -> None:
    store = stores()
    await store.put("alice", response_id(1), stored(mark=7))
    assert await store.get("alice", response_id(1)) == stored(mark=7)
    for tenant in ("bob", ""):
        assert await store.get(tenant, response_id(1)) is None
        assert not await store.delete(tenant, response_id(1))
    assert await store.get("alice", response_id(2)) is None
    assert await store.delete("alice", response_id(1))
    assert await store.get("alice", response_id(1)) is None
    assert not await store.delete("alice", response_id(1))


async def test_the_newest_of_a_tenant_are_kept(stores: Stores) -> None:
    store = stores(max_stored_responses_per_tenant=3)
    await store.put("bob", response_id(0), stored())
    for number in range(6):
        stores.clock.now_s += 1
        await store.put("alice", response_id(number), stored())
    assert await found(store, "alice", range(6)) == [3, 4, 5]
    assert await found(store, "bob", range(6)) == [0]


async def test_a_tenants_bytes_are_limited(stores: Stores) -> None:
    store = stores(max_stored_bytes_per_tenant=10_000)
    for number in range(6):
        stores.clock.now_s += 1
        await store.put("alice", response_id(number), stored(2_000))
    assert await found(store, "alice", range(6)) == [3, 4, 5]
    stores.clock.now_s += 1
    await store.put("alice", response_id(6), stored(10_000))
    assert await found(store, "alice", range(7)) == [3, 4, 5], "what can never fit drops nothing"
    stores.clock.now_s += 1
    await store.put("alice", response_id(7), stored(8_000))
    assert await found(store, "alice", range(8)) == [7]


async def test_nothing_is_kept_where_the_limit_is_0(stores: Stores) -> None:
    store = stores(max_stored_responses_per_tenant=0)
    await store.put("alice", response_id(1), stored())
    assert await store.get("alice", response_id(1)) is None


async def test_old_responses_are_dropped() -> None:
    """Redis counts its keys' time itself (`test_redis_drops_values_by_itself`)."""
    clock = Clock()
    store = MemoryResponseStore(settings_with(RouterSettings, max_stored_response_age_s=60), clock)
    await store.put("alice", response_id(1), stored())
    clock.now_s += 30
    await store.put("bob", response_id(2), stored())
    assert await store.get("alice", response_id(1)) is not None
    clock.now_s += 30
    assert await store.get("alice", response_id(1)) is None
    assert await store.get("bob", response_id(2)) is not None
    clock.now_s += 30
    assert not await store.delete("bob", response_id(2))
    assert (store.num_bytes, store._tenants, store._by_age) == (0, {}, {})


async def test_the_tenant_with_most_bytes_makes_room() -> None:
    store = MemoryResponseStore(settings_with(RouterSettings, max_stored_bytes=10_000))
    await store.put("bob", response_id(0), stored())
    for number in range(1, 20):
        await store.put("alice", response_id(number), stored(1_000))
    assert await found(store, "bob", range(1)) == [0]
    assert await found(store, "alice", range(20)) == [16, 17, 18, 19]
    assert store.num_bytes <= 10_000


async def test_a_response_has_a_limit_of_its_own(stores: Stores) -> None:
    store = stores(max_stored_response_bytes=5_000)
    await store.put("alice", response_id(1), stored(3_000))
    await store.put("alice", response_id(2), stored(5_000))
    assert await found(store, "alice", range(3)) == [1]


@pytest.mark.parametrize(
    "name",
    [
        "max_stored_response_bytes",
        "max_stored_responses_per_tenant",
        "max_stored_bytes_per_tenant",
        "max_stored_bytes",
        "max_stored_response_age_s",
    ],
)
def test_limits_are_checked(name: str) -> None:
    limits: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=name):
        settings_with(RouterSettings, **limits).verify()


@pytest.fixture
async def redis_stores(server: RedisServer) -> AsyncIterator[Stores]:
    server.do("FLUSHALL")
    made = Stores(server)
    yield made
    for store in made.made:
        await store.close()


def key_of(tenant: str, number: int) -> str:
    return f"{{pdserve}}:response:{tenant_digest(KEY, tenant).hex()}:{response_id(number)}"


async def test_routers_share_responses(redis_stores: Stores) -> None:
    here, there = redis_stores(), redis_stores()
    await here.put("alice", response_id(1), stored(mark=7))
    assert await there.get("alice", response_id(1)) == stored(mark=7)
    assert await there.delete("alice", response_id(1))
    assert await here.get("alice", response_id(1)) is None


async def test_redis_drops_values_by_itself(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores(max_stored_response_age_s=60)
    await store.put("alice", response_id(1), stored())
    assert 50_000 < server.do("PTTL", key_of("alice", 1)) <= 60_000
    redis_stores.clock.now_s += 61
    await store.put("alice", response_id(2), stored())
    index = f"{{pdserve}}:responses:{tenant_digest(KEY, 'alice').hex()}"
    assert server.do("ZCARD", index) == 1
    assert 50_000 < server.do("PTTL", index) <= 60_000


async def test_values_in_redis_cannot_be_read_copied_or_changed(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores()
    await store.put("alice", response_id(1), StoredResponse(b'{"secret": 4711}', b"[]", 0))
    value = server.do("GET", key_of("alice", 1))
    assert b"secret" not in value
    copies = {key_of("bob", 1): ("bob", 1), key_of("alice", 2): ("alice", 2)}
    for key, (tenant, number) in copies.items():
        server.do("SET", key, value)
        assert await store.get(tenant, response_id(number)) is None
    for forged in (b"", b"x", value[:20], value[:-1], value + b"x", value[:30] + bytes([value[30] ^ 1]) + value[31:]):
        server.do("SET", key_of("alice", 1), forged)
        assert await store.get("alice", response_id(1)) is None
    server.do("SET", key_of("alice", 1), value)
    other = redis_stores(DeploymentKey(b"fedcba9876543210"))
    assert await other.get("alice", response_id(1)) is None
    assert await store.get("alice", response_id(1)) is not None


async def test_a_value_beyond_the_limit_is_not_read(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores()
    await store.put("alice", response_id(1), stored(6_000))
    assert await redis_stores(max_stored_bytes_per_tenant=5_000).get("alice", response_id(1)) is None


async def test_a_forged_value_does_not_keep_the_event_loop(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores()
    # the largest that is read, and the largest that Redis may hold for a tenant
    for num_bytes in (8 << 20, 64 << 20):
        server.do("SETRANGE", key_of("alice", 1), num_bytes - 1, "x")
        answer, watch = await watched(lambda: store.get("alice", response_id(1)))
        assert answer is None
        assert watch.longest_s < LOOP_S, watch.callback
        with TracedMemory() as memory:
            assert await store.get("alice", response_id(1)) is None
            assert memory.peak_bytes < 64 << 20


async def test_a_large_response_does_not_keep_the_event_loop(redis_stores: Stores) -> None:
    store = redis_stores()
    large = stored(7 << 20)

    async def keep() -> None:
        await store.put("alice", response_id(1), large)
        assert await store.get("alice", response_id(1)) == large

    _, watch = await watched(keep)
    assert watch.longest_s < LOOP_S, watch.callback


async def test_a_value_that_was_kept_elsewhere_expires(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores(max_stored_response_age_s=60)
    await store.put("alice", response_id(1), stored())
    value = server.do("GET", key_of("alice", 1))
    for passed_s, is_found in ((59, True), (1, False)):
        redis_stores.clock.now_s += passed_s
        server.do("SET", key_of("alice", 1), value)
        assert (await store.get("alice", response_id(1)) is not None) is is_found


async def test_an_index_with_large_members_is_deleted_unread(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores()
    index = f"{{pdserve}}:responses:{tenant_digest(KEY, 'alice').hex()}"
    server.do("ZADD", index, 2e9, "x" * (64 << 20))
    with TracedMemory() as memory:
        await store.put("alice", response_id(1), stored())
        assert memory.peak_bytes < 32 << 20
    assert server.do("ZRANGE", index, 0, -1) == [f"{stored().num_bytes}:{response_id(1)}".encode()]
    assert await store.get("alice", response_id(1)) == stored()


async def test_an_index_of_many_responses_is_kept(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores(max_stored_responses_per_tenant=1500)
    index = f"{{pdserve}}:responses:{tenant_digest(KEY, 'alice').hex()}"
    members = [part for number in range(1500) for part in (2e9, f"9999:{response_id(number)}")]
    server.do("ZADD", index, *members)
    await store.put("alice", response_id(1500), stored())
    assert server.do("ZCARD", index) == 1500
    assert server.do("MEMORY", "USAGE", index, "SAMPLES", 0) < 256 * 1500


async def test_foreign_members_of_the_index_are_dropped(redis_stores: Stores, server: RedisServer) -> None:
    store = redis_stores(max_stored_responses_per_tenant=2)
    index = f"{{pdserve}}:responses:{tenant_digest(KEY, 'alice').hex()}"
    server.do("ZADD", index, 2e9, "x", 2e9, f"5:{response_id(1)[:-1]}", 2e9, f"{10**13}:{response_id(2)}")
    await store.put("alice", response_id(3), stored())
    assert server.do("ZRANGE", index, 0, -1) == [f"{stored().num_bytes}:{response_id(3)}".encode()]
    assert await store.get("alice", response_id(3)) == stored()


async def test_without_redis_nothing_is_stored_and_finding_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path) as server:
        stores = Stores(server)
        store = stores()
        await store.put("alice", response_id(1), stored())
        server.do("SET", f"{{pdserve}}:responses:{tenant_digest(KEY, 'bob').hex()}", "x")
        await store.put("bob", response_id(1), stored())
        assert await store.get("alice", response_id(1)) is not None, "a foreign type is no outage"
        server.kill()
        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                with pytest.raises(PeerError, match="cannot be reached") as caught:
                    await store.get("alice", response_id(1))
                assert (caught.value.http_status, caught.value.retryable) == (503, True)
                await store.put("alice", response_id(2), stored())
        assert len(caplog.records) == 1
        await store.close()
