"""Redis adds workers, and never removes them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.kv_event_subscription import FeedSource
from tests.support.run.waiting import eventually
from tests.support.transfers.registry_world import World, lines, settled, source


async def test_a_record_that_vanishes_changes_nothing_while_the_watch_lives(world: World) -> None:
    worker = await world.worker()
    worker.change(stored=range(5))
    router = await world.router()
    await router.joined(worker)
    await worker.stop_publishing()
    await eventually(lambda: not world.redis.do("EXISTS", "{test}:worker:decode-0"))
    worker.change(stored=[9])
    await eventually(lambda: router.agrees(worker) and source(router, worker) is FeedSource.WORKER)
    assert router.knows(worker)
    assert router.fleet.counts()["decode"]["addresses"] == 1


async def test_what_is_dead_and_unrecorded_is_forgotten(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = await world.worker()
    router = await world.router()
    await router.joined(worker)
    await worker.kill()
    await eventually(lambda: not router.fleet.counts()["decode"]["addresses"])
    assert len(lines(caplog, "is forgotten")) == 1
    # and found again
    again = await world.worker(port=worker.port)
    await router.joined(again)


async def test_an_address_may_come_to_a_worker_of_the_other_role(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.router.workers.redis_discovery.FORGET_AFTER_S", 60.0)
    decode = await world.worker("decode-0")
    router = await world.router()
    await router.joined(decode)
    await decode.leave()
    prefill = await world.worker("prefill-0", WorkerRole.PREFILL, port=decode.port)
    await router.joined(prefill)
    assert router.fleet.counts()["decode"]["addresses"] == 0


async def test_an_address_from_settings_is_never_forgotten(world: World) -> None:
    worker = await world.worker()
    router = await world.router(flags=True)
    await router.joined(worker)
    assert router.fleet.introduced() == []
    await worker.kill()
    await eventually(lambda: not router.knows(worker))
    await asyncio.sleep(0.8)
    assert router.fleet.counts()["decode"]["addresses"] == 1


async def test_settings_and_redis_name_the_same_worker_once(world: World) -> None:
    worker = await world.worker()
    router = await world.router(flags=True)
    await settled(world, router, worker)
    assert router.fleet.counts()["decode"] == {"addresses": 1, "live": 1, "draining": 0, "refused": 0}


async def test_two_names_of_one_address_are_one_worker(world: World) -> None:
    worker = await world.worker(host="localhost")
    worker.change(stored=range(4))
    world._addresses[WorkerRole.DECODE] = [f"127.0.0.1:{worker.port}"]
    router = await world.router(flags=True)
    await eventually(lambda: router.fleet.counts()["decode"]["live"] == 2)
    assert len(router.fleet.lives()) == 1
    await settled(world, router, worker)


async def test_a_worker_that_does_not_publish_tells_its_blocks_itself(world: World) -> None:
    worker = await world.worker(publishes=False)
    worker.change(stored=range(5))
    router = await world.router(flags=True)
    await router.joined(worker)
    assert source(router, worker) is FeedSource.WORKER
    worker.change(stored=[9])
    await eventually(lambda: router.agrees(worker))


async def test_two_workers_with_one_id(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first = await world.worker("twin")
    first.change(stored=range(5))
    router = await world.router()
    await router.joined(first)
    second = await world.worker("twin")
    second.change(stored=range(50, 58))
    await router.joined(first, second)
    await eventually(lambda: first.publisher.num_conflicts)
    await asyncio.sleep(0.6)
    said = lines(caplog, "worker id twin is also that of a worker at")
    assert len(said) == 1
    assert second.address in said[0]
    assert first.address in said[0]
    assert not second.publisher.num_conflicts
    # both serve on, and each is told of by whoever can
    assert router.knows(first)
    assert router.knows(second)
    first.change(stored=[7])
    second.change(stored=[70])
    await router.joined(first, second)
    await eventually(lambda: source(router, first) is FeedSource.WORKER)
    await eventually(lambda: source(router, second) is FeedSource.REDIS)
    # when the later one has left, the earlier one has its record again
    await second.leave()
    await settled(world, router, first)


async def test_a_clean_leave_takes_everything_back(world: World) -> None:
    worker = await world.worker()
    worker.change(stored=range(5))
    await (await world.router()).joined(worker)
    assert len(world.redis.do("KEYS", "*")) == 4
    await worker.leave()
    assert world.redis.do("KEYS", "*") == []


async def test_leaving_takes_nothing_from_a_later_life(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.worker.redis_publisher.RECORD_TTL_S", 60.0)
    old = await world.worker()
    await eventually(lambda: world.redis.do("EXISTS", "{test}:worker:decode-0"))
    new = await world.worker()
    router = await world.router()
    await router.joined(new)
    await eventually(lambda: old.publisher.num_conflicts)
    await old.leave()
    assert world.redis.do("HGET", "{test}:worker:decode-0", "epoch") == f"{new.key[1]:016x}".encode()


async def test_all_that_a_dead_worker_published_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BLOCKS_TTL_S", "WORKERS_TTL_S"):
        monkeypatch.setattr(f"pdserve.worker.redis_publisher.{name}", 0.6)
    worker = await world.worker()
    worker.change(stored=range(5))
    await (await world.router()).joined(worker)
    await worker.kill()
    await eventually(lambda: world.redis.do("KEYS", "*") == [])


async def test_no_token_and_no_text_stands_in_redis(world: World) -> None:
    worker = await world.worker()
    worker.change(stored=range(5))
    await (await world.router()).joined(worker)
    record = world.redis.do("HGETALL", "{test}:worker:decode-0")
    assert set(record) == {
        b"epoch", b"registered_us", b"role", b"address", b"protocol_version", b"model_fingerprint",
        b"layout_fingerprint", b"tokenizer_fingerprint", b"signature", b"seq", b"count",
    }  # fmt: skip
    [(_, fields), *_] = world.redis.do("XREVRANGE", f"{{test}}:events:decode-0:{worker.key[1]:016x}", "+", "-")
    assert set(fields) == {b"seq", b"cleared", b"stored", b"removed"}
    assert {len(member) for member in world.redis.do("SMEMBERS", f"{{test}}:blocks:decode-0:{worker.key[1]:016x}")} == {
        8
    }
