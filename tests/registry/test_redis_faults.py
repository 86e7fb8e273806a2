"""Faults of Redis have no effect on workers: routers keep them, and the index comes right by itself."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator

import pytest

from pdserve.router.workers.kv_event_subscription import FeedSource
from tests.support.processes.redis_server import RedisServer
from tests.support.run.waiting import eventually
from tests.support.transfers.registry_world import World, block, lines, settled, source

RECORD = "{test}:worker:decode-0"
IDS = "{test}:workers"


def key(kind: str, worker: object) -> str:
    worker_id, epoch = worker.key  # type: ignore[attr-defined]
    return {"worker": RECORD, "workers": IDS}.get(kind) or f"{{test}}:{kind}:{worker_id}:{epoch:016x}"


KEYS = pytest.mark.parametrize("kind", ["workers", "worker", "blocks", "events"])


async def test_flush(world: World) -> None:
    worker = await world.worker()
    worker.change(stored=range(50))
    router = await world.router()
    await router.joined(worker)
    world.redis.do("FLUSHALL")
    worker.change(stored=[60], removed=[1])
    assert router.knows(worker)
    await settled(world, router, worker)


@pytest.mark.few(2)
@KEYS
async def test_one_key_is_deleted(world: World, kind: str) -> None:
    worker = await world.worker()
    worker.change(stored=range(50))
    router = await world.router()
    await router.joined(worker)
    assert world.redis.do("DEL", key(kind, worker)) == 1
    await eventually(lambda: world.redis.do("EXISTS", key(kind, worker)))
    await settled(world, router, worker)


@pytest.mark.few(3)
@KEYS
@pytest.mark.parametrize("command", [("SET", "x"), ("RPUSH", "x")])
async def test_a_key_of_another_type(
    world: World, kind: str, command: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    worker, other = await world.worker(), await world.worker("decode-1")
    worker.change(stored=range(50))
    other.change(stored=range(9))
    router = await world.router()
    await router.joined(worker, other)
    with world.redis.admin() as admin, admin.pipeline() as replace:
        replace.delete(key(kind, worker)).execute_command(command[0], key(kind, worker), command[1]).execute()
    worker.change(stored=[70])
    await settled(world, router, worker, other)
    assert 1 <= len(lines(caplog, "foreign values stood under this worker's keys")) <= 2
    publisher = worker.publisher
    assert publisher is not None
    assert publisher.breaker.errors["wrong_type"] or kind == "workers"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(("HSET", RECORD, "role", "banana"), "role is b'banana'", id="role"),
        pytest.param(("HSET", RECORD, "address", "unix:/tmp/x"), "address is b'unix:/tmp/x'", id="scheme"),
        pytest.param(("HSET", RECORD, "address", "127.0.0.1:99999"), "address is '127.0.0.1:99999'", id="port"),
        pytest.param(("HSET", RECORD, "epoch", "-1"), "epoch is b'-1'", id="epoch"),
        pytest.param(("HSET", RECORD, "seq", b"\xff\xfe"), "seq is", id="not-text"),
        pytest.param(("HSET", RECORD, "count", "9" * 18), "count is", id="too-large"),
        pytest.param(("HSET", RECORD, "tokenizer_fingerprint", "a" * 100_000), "(100000 bytes)", id="too-long"),
        pytest.param(("HDEL", RECORD, "role"), "role is missing", id="missing"),
        pytest.param(("ZADD", IDS, "9" * 12, "../../x y"), "worker_id is b'../../x y'", id="id"),
    ],
)
async def test_a_malformed_value_is_told_once_and_written_again(
    world: World, command: tuple[object, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await world.worker()
    worker.change(stored=range(5))
    router = await world.router()
    await router.joined(worker)
    await eventually(lambda: source(router, worker) is FeedSource.REDIS)

    def is_read() -> bool:
        # once is not enough: a worker that is writing its record replaces the value before anyone reads it
        if not lines(caplog, said):
            world.redis.do(*command)
        return bool(lines(caplog, said))

    await eventually(is_read)
    await settled(world, router, worker)
    assert router.knows(worker)
    assert len(lines(caplog, said, "redis_discovery")) <= 2
    assert len(lines(caplog, said, "redis_publisher")) <= 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(("*", "hello", "world"), id="other-fields"),
        pytest.param(("*", "seq", "x", "cleared", "0", "stored", "", "removed", ""), id="no-number"),
        pytest.param(("*", "seq", "99", "cleared", "0", "stored", "", "removed", ""), id="gap"),
        pytest.param(("*", "seq", "2", "cleared", "0", "stored", "short", "removed", ""), id="half-a-hash"),
        pytest.param((f"{2**64 - 1}-{2**64 - 1}", "seq", "9"), id="last-possible-id"),
    ],
)
async def test_a_foreign_entry_in_the_stream(
    world: World, entry: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    worker = await world.worker()
    worker.change(stored=range(5))
    router = await world.router()
    await router.joined(worker)
    await eventually(lambda: source(router, worker) is FeedSource.REDIS)
    world.redis.do("XADD", key("events", worker), *entry)
    await eventually(lambda: lines(caplog, "are read again"))
    worker.change(stored=[9])
    await settled(world, router, worker)
    assert router.directory.counts["blocks"]


@pytest.mark.parametrize("member", [b"short", b"x" * 16], ids=["malformed", "unknown"])
async def test_a_foreign_member_of_the_set(world: World, member: bytes) -> None:
    worker = await world.worker()
    worker.change(stored=range(5))
    await (await world.router()).joined(worker)
    world.redis.do("SADD", key("blocks", worker), member)
    router = await world.router()
    await settled(world, router, worker)
    assert not router.index.match([b"x" * 16], [worker.key], 0.0)[worker.key]
    assert not world.redis.do("SISMEMBER", key("blocks", worker), member)


async def test_a_stream_that_is_trimmed_before_it_was_read(
    own_redis: RedisServer, fragile: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own_redis.do("CONFIG", "SET", "stream-node-max-entries", 1)
    monkeypatch.setattr("pdserve.worker.redis_publisher.EVENTS_KEPT", 3)
    monkeypatch.setattr("pdserve.worker.redis_publisher.PUBLISH_EVERY_S", 0.001)
    worker = await fragile.worker()
    router = await fragile.router()
    await router.joined(worker)
    await eventually(lambda: source(router, worker) is FeedSource.REDIS)
    monkeypatch.setattr("pdserve.router.workers.redis_discovery.LOOK_EVERY_S", 0.3)
    numbers = itertools.count()
    while not lines(caplog, "was expected"):  # the stream is trimmed before the router looks
        worker.change(stored=[next(numbers)])
        await asyncio.sleep(0.01)
    assert own_redis.do("XLEN", key("events", worker)) <= 4
    monkeypatch.setattr("pdserve.router.workers.redis_discovery.LOOK_EVERY_S", 0.02)
    await settled(fragile, router, worker)


async def test_killed_and_started_again(
    own_redis: RedisServer, fragile: World, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await fragile.worker()
    worker.change(stored=range(20))
    router = await fragile.router()
    await router.joined(worker)
    await eventually(lambda: source(router, worker) is FeedSource.REDIS)
    own_redis.kill()
    await asyncio.sleep(0.1)
    assert router.knows(worker)
    assert router.agrees(worker), "the replica was not kept"
    worker.change(stored=[30])
    # after a while the worker is asked itself
    await eventually(lambda: router.agrees(worker))
    assert source(router, worker) is FeedSource.WORKER
    own_redis.start()
    await settled(fragile, router, worker)
    for name in ("redis_publisher", "redis_discovery"):
        assert len(lines(caplog, "cannot be used (unreachable", name)) == 1
        assert len(lines(caplog, "is back after", name)) == len(lines(caplog, "cannot be used", name))
    assert router.directory.breaker.errors["unreachable"]
    assert worker.publisher.breaker.errors["unreachable"]


@pytest.mark.slow
async def test_stopped_and_continued(own_redis: RedisServer, fragile: World, caplog: pytest.LogCaptureFixture) -> None:
    worker = await fragile.worker()
    worker.change(stored=range(20))
    router = await fragile.router()
    await router.joined(worker)
    own_redis.signal(signal.SIGSTOP)
    worker.change(stored=[30], removed=[0])
    await eventually(lambda: source(router, worker) is FeedSource.WORKER and router.agrees(worker))
    assert router.knows(worker)
    await eventually(lambda: lines(caplog, "cannot be used (timeout", "redis_discovery"))
    own_redis.signal(signal.SIGCONT)
    await settled(fragile, router, worker)
    # each outage is told once; a busy machine may keep a further command waiting
    assert len(lines(caplog, "cannot be used", "redis_discovery")) == len(
        lines(caplog, "is back after", "redis_discovery")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "mended", "kind"),
    [
        pytest.param(("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "full", id="full"),
        pytest.param(("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "read_only", id="read-only"),
    ],
)
async def test_it_can_be_read_and_not_written(
    own_redis: RedisServer,
    fragile: World,
    broken: tuple[str, ...],
    mended: tuple[str, ...],
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own_redis.do("CONFIG", "SET", "maxmemory-policy", "noeviction")
    worker = await fragile.worker()
    worker.change(stored=range(20))
    router = await fragile.router()
    await router.joined(worker)
    own_redis.do(*broken)
    worker.change(stored=[30], removed=[0])
    await eventually(lambda: source(router, worker) is FeedSource.WORKER and router.agrees(worker))
    assert router.knows(worker)
    assert len(lines(caplog, f"cannot be used ({kind}", "redis_publisher")) == 1
    own_redis.do(*mended)
    await settled(fragile, router, worker)


@pytest.fixture
async def loading(own_redis: RedisServer) -> AsyncIterator[asyncio.Server]:
    """In the place of the server, something that says that it is loading."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.startswith(b"*"):
                writer.write(b"-LOADING Redis is loading the dataset in memory\r\n")
        writer.close()

    own_redis.kill()
    server = await asyncio.start_server(answer, "127.0.0.1", own_redis.port)
    yield server
    server.close()


async def test_it_loads_when_services_start(
    loading: asyncio.Server, own_redis: RedisServer, fragile: World, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await fragile.worker()
    worker.change(stored=range(20))
    router = await fragile.router()
    await eventually(lambda: len(lines(caplog, "cannot be used (loading")) == 2)
    loading.close()
    own_redis.start()
    await settled(fragile, router, worker)


@pytest.mark.slow
async def test_it_starts_after_everything_else(own_redis: RedisServer, fragile: World) -> None:
    own_redis.kill()
    worker = await fragile.worker()
    worker.change(stored=range(20))
    by_address = await fragile.router(flags=True)
    found = await fragile.router()
    await by_address.joined(worker)
    assert source(by_address, worker) is FeedSource.WORKER
    own_redis.start()
    await settled(fragile, found, worker)
    await settled(fragile, by_address, worker)


async def test_blocks_of_one_worker_stay_with_it(world: World) -> None:
    """A worker's keys in Redis concern that worker: a key of another life is not read."""
    worker = await world.worker()
    worker.change(stored=range(3))
    world.redis.do("SADD", f"{{test}}:blocks:decode-0:{1:016x}", block(77))
    router = await world.router()
    await settled(world, router, worker)
    assert not router.index.match([block(77)], [worker.key], 0.0)[worker.key]
