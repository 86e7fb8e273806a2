"""Real processes that know each other through a real Redis alone, and what befalls it under load."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.redis_server import RedisServer, redis_server
from tests.support.run.waiting import HANG_S, eventually

pytestmark = pytest.mark.process

NUM_TOKENS = 10
_READ = re.compile(r"worker (\S+) \(\S+, epoch \S+\): (\d+) blocks read from Redis")


def prompts() -> list[list[int]]:
    """Some that share a beginning."""
    draw = random.Random(5)
    beginnings = [[draw.randrange(3, 300) for _ in range(64)] for _ in range(3)]
    return [beginning + [draw.randrange(3, 300) for _ in range(20)] for beginning in beginnings for _ in range(3)]


class Load:
    """Asks the same greedy questions again and again; every answer must be the first one again."""

    def __init__(self) -> None:
        self.num_answers = 0
        self._expected: dict[int, list[int]] = {}
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, client: InferenceClient, num_clients: int) -> None:
        self._tasks += [asyncio.create_task(self._ask(client, number)) for number in range(num_clients)]

    async def answers(self, more: int) -> None:
        """Until so many more have come."""
        enough = self.num_answers + more
        await eventually(lambda: self.num_answers >= enough or any(task.done() for task in self._tasks), "answers")
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _ask(self, client: InferenceClient, number: int) -> None:
        asked = list(enumerate(prompts()))
        while not self._stop.is_set():
            which, prompt = asked[number % len(asked)]
            number += 1
            answer = await client.ask(prompt, max_tokens=NUM_TOKENS)
            assert len(answer.token_ids) == NUM_TOKENS
            assert self._expected.setdefault(which, answer.token_ids) == answer.token_ids
            self.num_answers += 1


def start_workers(cluster: Cluster, flags: tuple[str, ...]) -> None:
    """Two and two, all at once."""
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    for service in [cluster.launch_worker(name.partition("-")[0], *flags, name=name) for name in names]:
        cluster.wait_for_worker(service)


def published(redis: RedisServer) -> dict[str, int]:
    """worker -> blocks that Redis holds of it."""
    # an empty set does not exist; a stream, once begun, does
    streams = redis.do("KEYS", "{test}:events:*")
    assert isinstance(streams, list)
    return {
        key.split(b":")[2].decode(): int(str(redis.do("SCARD", key.replace(b"events", b"blocks")))) for key in streams
    }


def blocks_read(router: Service) -> dict[str, int]:
    """worker -> blocks that the router read from Redis, the last time."""
    return {worker: int(count) for worker, count in _READ.findall(router.read_log())}


@pytest.mark.slow
async def test_redis_fails_in_every_way_and_no_request_does(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    with redis_server(tmp_path) as redis, running_cluster(tmp_path) as cluster:
        common = ("--model", str(model), "--redis", redis.url, "--redis-namespace=test")
        workers = (*common, "--connector", "tcp", "--dtype=float32", "--num-blocks=300")
        router = cluster.start_router(*common)
        start_workers(cluster, workers)
        load = Load()
        async with AsyncExitStack() as stack:
            load.start(await stack.enter_async_context(InferenceClient(router.address)), 3)
            await load.answers(9)
            await eventually(lambda: len(blocks_read(router)) == 4, "the router follows all four workers")

            witnesses = [router, cluster.services["prefill-0"]]

            def said(text: str, times: int) -> bool:
                return all(service.read_log().count(text) >= times for service in witnesses)

            await asyncio.to_thread(redis.do, "FLUSHALL")
            await load.answers(10)
            await eventually(lambda: len(published(redis)) == 4, "everything is published again")
            faults: list[tuple[Callable[[], None], Callable[[], object]]] = [
                (lambda: redis.signal(signal.SIGSTOP), lambda: redis.signal(signal.SIGCONT)),
                (redis.kill, redis.start),
            ]
            for outages, (fault, mend) in enumerate(faults, start=1):
                await asyncio.to_thread(fault)
                await eventually(lambda times=outages: said("cannot be used (", times), "the outage is noticed")  # type: ignore[misc]
                await load.answers(10)
                await asyncio.to_thread(mend)
                await eventually(lambda times=outages: said("is back after", times), "Redis is used again")  # type: ignore[misc]
                await load.answers(10)
                await eventually(lambda: len(published(redis)) == 4, "everything is published again")
            # a second router, in mid-load, knows what all hold
            held = published(redis)
            assert any(held.values())
            second = await asyncio.to_thread(cluster.start_router, *common, name="router-2")
            await eventually(lambda: len(blocks_read(second)) == 4, "the second router is warm")
            read = blocks_read(second)
            assert all(read[worker] for worker, count in held.items() if count)
            load.start(await stack.enter_async_context(InferenceClient(second.address)), 1)
            await load.answers(10)
            # a worker that is told to leave ends what it has, and nothing of it stays
            leaving = cluster.services["decode-1"]
            leaving.signal(signal.SIGTERM)
            assert await asyncio.to_thread(leaving.process.wait, HANG_S) == 0
            await load.answers(10)
            assert sorted(published(redis)) == ["decode-0", "prefill-0", "prefill-1"]
            await load.stop()
        cluster.check_pools()
        cluster.check_logs()
        for service in witnesses:
            logs = service.read_log
            await eventually(lambda logs=logs: logs().count("cannot be used (") == logs().count("is back after"), logs)  # type: ignore[misc]


@pytest.mark.slow
async def test_up_with_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        log = tmp_path / "up.log"
        command = [
            sys.executable, "-m", "pdserve.cli.main", "up", "--prefill", "2", "--decode", "3", "--redis", redis.url,
            "--port", "0", "--grpc-port", "0", "--ask", "", "--num-blocks=100",
        ]  # fmt: skip
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environ | {"COLUMNS": "400"},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        try:
            await eventually(lambda: "ready  OpenAI" in log.read_text() or process.returncode is not None, "ready")
            assert process.returncode is None, log.read_text()
            await eventually(lambda: redis.do("ZCARD", "{pdserve}:workers") == 5, "five workers are registered")
            address = re.search(r"gRPC (\S+)", log.read_text())
            assert address is not None
            async with InferenceClient(address.group(1)) as client:
                assert len((await client.ask([5, 6, 7], max_tokens=5)).token_ids) == 5
        finally:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), HANG_S)
        assert redis.do("KEYS", "*") == []
