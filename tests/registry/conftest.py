"""A real Redis, and worlds with and without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.processes.redis_server import RedisServer, redis_server
from tests.support.transfers.registry_world import World


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """Running and empty."""
    shared_redis.do("FLUSHALL")
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may stop, kill and configure."""
    with redis_server(tmp_path) as server:
        yield server


async def _world(server: RedisServer | None) -> AsyncIterator[World]:
    before = asyncio.all_tasks()
    made = World(server)
    try:
        yield made
    finally:
        await made.close()
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if "pdserve" in repr(task.get_coro())}
    assert not left, f"tasks were left behind: {left}"


@pytest.fixture(params=["watch", "redis"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Once for each way."""
    async for made in _world(request.getfixturevalue("redis") if request.param == "redis" else None):
        yield made


@pytest.fixture
async def world(redis: RedisServer) -> AsyncIterator[World]:
    """Through a Redis that stays."""
    async for made in _world(redis):
        yield made


@pytest.fixture
async def fragile(own_redis: RedisServer) -> AsyncIterator[World]:
    """Through a Redis that is the test's own."""
    async for made in _world(own_redis):
        yield made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules, sooner."""
    monkeypatch.setattr("pdserve.router.workers.worker_watcher.RECONNECT_S", 0.05)
    monkeypatch.setattr("pdserve.router.workers.kv_event_subscription.ASK_AFTER_S", 0.6)
    monkeypatch.setattr("pdserve.router.workers.kv_event_subscription.ASK_AGAIN_S", 0.05)
    monkeypatch.setattr("pdserve.router.workers.redis_discovery.FIND_EVERY_S", 0.1)
    monkeypatch.setattr("pdserve.router.workers.redis_discovery.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("pdserve.router.workers.redis_discovery.FORGET_AFTER_S", 0.5)
    monkeypatch.setattr("pdserve.worker.redis_publisher.BEAT_S", 0.15)
    monkeypatch.setattr("pdserve.worker.redis_publisher.RECORD_TTL_S", 1.0)
    monkeypatch.setattr("pdserve.common.registry.circuit_breaker.LONGEST_WAIT_S", 0.3)
