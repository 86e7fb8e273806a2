"""Every field of a worker's record and of its stream of blocks wrong in every way: the router names it, and goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pdserve.common import kv_events
from pdserve.common.block_hash import PLACEMENT_HASH_BYTES
from pdserve.common.registry.registry import RECORD_FIELDS
from pdserve.router.workers.kv_event_subscription import FeedSource
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import eventually
from tests.support.transfers.registry_world import Router, Worker, World, source

VALUES: dict[str, bytes] = {
    "empty": b"", "zero": b"0", "negative": b"-1", "no number": b"x", "20 digits": b"9" * 20, "64 bits": b"9223372036854775808",
    "NUL": b"a\x00b", "not UTF-8": b"\xff\xfe", "a line": b"a\nb", "4 KiB": b"7" * 4096, "1 MiB": b"f" * (1 << 20),
}  # fmt: skip


WRITES: dict[str, tuple[str, ...]] = {
    "string": ("SET", "x"), "list": ("RPUSH", "x"), "set": ("SADD", "x"), "zset": ("ZADD", "1", "x"), "hash": ("HSET", "x", "x"),
    "stream": ("XADD", "*", "x", "x"),
}  # fmt: skip
"""kind of value: the command that makes one, and its arguments after the key."""


def put(world: World, key: str, kind: str) -> None:
    """Put a value of this kind in the key's place, in one transaction: the worker may write the key again at any time."""
    command, *arguments = WRITES[kind]
    with world.redis.admin() as admin, admin.pipeline(transaction=True) as transaction:
        transaction.delete(key)
        transaction.execute_command(command, key, *arguments)
        transaction.execute()


def lies(world: World, worker: Worker) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, what is done to Redis)"""
    worker_id, epoch = worker.key
    record, ids = f"{{test}}:worker:{worker_id}", "{test}:workers"
    blocks, events = (f"{{test}}:{name}:{worker_id}:{epoch:016x}" for name in ("blocks", "events"))
    do = world.redis.do
    for field in RECORD_FIELDS:
        yield f"{field} missing", partial(do, "HDEL", record, field)
        for name, value in VALUES.items():
            yield f"{field} {name}", partial(do, "HSET", record, field, value)
    for name, value in VALUES.items():
        yield f"id {name}", partial(do, "ZADD", ids, "9999999999", value)
        yield f"block {name}", partial(do, "SADD", blocks, value)
        for field in ("seq", "cleared", "stored", "removed"):
            entry = {"seq": b"1", "cleared": b"0", "stored": b"", "removed": b"", field: value}
            words = [word for pair in entry.items() for word in pair]
            yield f"entry {field} {name}", partial(do, "XADD", events, "*", *words)
    for key in (record, ids, blocks, events):
        yield f"{key} deleted", partial(do, "DEL", key)
        for kind in WRITES:
            yield f"{key} a {kind}", partial(put, world, key, kind)


async def try_all(world: World, caplog: pytest.LogCaptureFixture, step: int) -> None:
    caplog.set_level(logging.INFO)
    worker, honest = await world.worker("decode-0"), await world.worker("decode-1")
    worker.change(stored=range(4))
    honest.change(stored=range(4, 8))
    router: Router = await world.router()
    await router.joined(worker, honest)
    with LoopWatch() as watch:
        for number, (name, lie) in enumerate(lies(world, worker)):
            if number % step == step // 2:
                await asyncio.to_thread(lie)
                await asyncio.sleep(0.15)
                assert router.knows(worker), name
                assert router.knows(honest), name
    assert watch.longest_s < LOOP_S, (watch.longest_s, watch.callback)
    # the worker writes again what was changed
    await eventually(lambda: router.agrees(worker) and router.agrees(honest))
    for each in caplog.records:
        assert each.levelno < logging.ERROR, each.getMessage()[:2000]
        assert len(each.getMessage()) < 4096
    newcomer = await world.worker("decode-2")
    await router.joined(newcomer)


async def test_a_few_wrong_values_cost_no_worker(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await try_all(world, caplog, step=13)


@pytest.mark.slow
async def test_no_wrong_value_costs_a_worker(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await try_all(world, caplog, step=1)


async def test_changes_written_by_others_do_not_fill_the_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 8)
    worker = await world.worker("decode-0")
    worker.change(stored=range(4))
    router: Router = await world.router()
    await router.joined(worker)
    await eventually(lambda: source(router, worker) is FeedSource.REDIS)
    events = f"{{test}}:events:{worker.key[0]}:{worker.key[1]:016x}"
    for number in range(20):
        [[_, last]] = world.redis.do("XREVRANGE", events, "+", "-", "COUNT", "1")
        seq = int(last[b"seq"]) + 1
        stored = b"".join((4 * number + each).to_bytes(PLACEMENT_HASH_BYTES, "big") for each in range(4))
        world.redis.do("XADD", events, "*", "seq", str(seq), "cleared", "0", "stored", stored, "removed", b"")
        await asyncio.sleep(0.02)
        assert router.index.num_blocks(worker.key) <= 8
        assert router.knows(worker)
    await eventually(lambda: router.agrees(worker))
