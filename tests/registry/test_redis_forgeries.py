"""Somebody who can write to Redis and lacks the deployment key: routers connect to nobody new and believe nothing new."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.common.net.rpc import bind, make_channel, make_server
from pdserve.common.registry.registry import RecordSigner
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey
from pdserve.router.workers import redis_discovery as redis_directory
from tests.support.run.waiting import eventually
from tests.support.transfers.registry_world import World, lines

WATCH = "/pdserve.v1.WorkerService/Watch"
LOOKS_S = 1.3
"""Two looks for workers, and a moment."""


class Listener:
    """Counts who connects."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def listener() -> AsyncIterator[Listener]:
    made = Listener()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.num_connections += 1
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


def copy(world: World, source: str, target: str, **changes: str) -> None:
    """Put a copy of one worker's record under another id."""
    record = {
        name.decode(): value.decode() for name, value in world.redis.do("HGETALL", f"{{test}}:worker:{source}").items()
    }
    put(world, target, record | changes)


def put(world: World, worker_id: str, record: dict[str, str]) -> None:
    fields = [each for pair in record.items() for each in pair]
    world.redis.do("HSET", f"{{test}}:worker:{worker_id}", *fields)
    world.redis.do("ZADD", "{test}:workers", "9999999999", worker_id)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", ["copied to another id", "signed with another key", "unsigned", "another namespace"])
async def test_a_forged_record_introduces_nobody_and_is_dialled_by_nobody(
    world: World, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    worker = await world.worker()
    router = await world.router()
    await router.joined(worker)
    async with listener() as stranger:
        copy(world, "decode-0", "decode-9", address=stranger.address)
        if change in ("signed with another key", "another namespace"):
            key = DeploymentKey(b"a stranger's own key, long enough")
            signer = (
                RecordSigner(DEVELOPMENT_KEY, "other") if change == "another namespace" else RecordSigner(key, "test")
            )
            assert router.directory is not None
            record = router.directory._records["decode-0"]
            forged = signer.signed(type(record)(**{
                name: {"worker_id": "decode-9", "address": stranger.address}.get(name, getattr(record, name))
                for name in record.__struct_fields__
            }))  # fmt: skip
            put(world, "decode-9", {name: str(value) for name, value in forged.fields().items()})
        elif change == "unsigned":
            world.redis.do("HDEL", "{test}:worker:decode-9", "signature")
        await asyncio.sleep(LOOKS_S)
        assert stranger.num_connections == 0
    assert router.fleet.introduced() == [worker.address]
    assert router.fleet.counts()["decode"] == {"addresses": 1, "live": 1, "draining": 0, "refused": 0}
    assert lines(caplog, "the record of worker decode-9")
    assert router.knows(worker)


async def test_a_forged_later_life_does_not_silence_the_worker(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The later of two lives has the record; one that is only claimed has nothing."""
    worker = await world.worker()
    router = await world.router()
    await router.joined(worker)
    registered_us = int(world.redis.do("HGET", "{test}:worker:decode-0", "registered_us"))
    copy(world, "decode-0", "decode-0", epoch="00000000000000aa", registered_us=str(registered_us + 1))
    await eventually(lambda: lines(caplog, "was unusable and is written again"))
    await eventually(
        lambda: world.redis.do("HGET", "{test}:worker:decode-0", "epoch") == f"{worker.key[1]:016x}".encode()
    )
    assert worker.publisher is not None
    assert worker.publisher.num_conflicts == 0
    assert router.knows(worker)


async def test_what_another_worker_answers_is_not_taken_from_where_a_stranger_passes_it_on(world: World) -> None:
    """A true record, of a life that is over, whose address a stranger has now: it hands on each message of a watch."""
    old = await world.worker("decode-1")
    router_before = await world.router()
    await router_before.joined(old)
    record = {
        name.decode(): value.decode() for name, value in world.redis.do("HGETALL", "{test}:worker:decode-1").items()
    }
    await old.leave()
    worker = await world.worker("decode-0")
    relay = make_server()

    async def pass_on(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async with make_channel(worker.address) as channel:
            watch: Any = channel.stream_stream(WATCH)
            async for answer in watch(requests):
                yield answer

    handlers: Any = {"Watch": grpc.stream_stream_rpc_method_handler(pass_on)}
    relay.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdserve.v1.WorkerService", handlers),))
    assert bind(relay, "127.0.0.1", old.port) == old.port
    await relay.start()
    try:
        put(world, "decode-1", record)
        router = await world.router()
        await router.joined(worker)
        await eventually(lambda: router.fleet.counts()["decode"]["refused"] == 1)
        [life] = router.fleet.lives()
        assert life.channel.channel is not None
        assert router.fleet.counts()["decode"]["live"] == 1
        [(_, address, why)] = router.fleet.absent()
        assert address == old.address
        assert f"it says that it is reached at {worker.address}" in why
    finally:
        await relay.stop(None)


async def test_true_records_are_dialled_a_bounded_number_a_look(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(redis_directory, "MAX_NEW_ADDRESSES", 2)
    workers = [await world.worker(f"decode-{number}") for number in range(5)]
    router = await world.router()
    directory = router.directory
    assert directory is not None
    looks, notify = [0], directory._notify

    def count(fleet: Any, now_s: float) -> None:
        notify(fleet, now_s)
        looks.append(len(fleet.introduced()))

    monkeypatch.setattr(directory, "_notify", count)
    await router.joined(*workers)
    assert looks[-1] == 5
    # the first look came before the counting
    steps = [later - earlier for earlier, later in itertools.pairwise(looks[1:])]
    assert all(step <= 2 for step in steps)
    assert looks[1] <= 4
