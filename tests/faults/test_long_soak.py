"""Mixed load of several tenants with kills, and clients that read nothing, for as long as asked: nothing grows, nothing dies, no
answer changes.

`make soak MINUTES=60`. Each minute it prints memory, descriptors and threads of every process, the workers' blocks and
the size of the router's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
import psutil
import pytest

from pdserve.common.errors import Overloaded
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.settings.api_key_file import key_hash
from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.redis_server import RedisServer, redis_server
from tests.support.processes.unread_client import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    OPENING,
    PING,
    frame,
    header_block,
    unread,
)

from .chaos_load import FLAGS, Load
from .prepared_worker import PREPARED_WORKER
from .worker_faults import WAYS, WORKERS, check_whole, hurt, role_of

SOAK_S = float(os.environ.get("SOAK_S", "120"))
REPORT_S = min(60.0, SOAK_S / 6)
pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(SOAK_S + 300)]

KEPT = ("router", "prefill-1", "decode-1")
"""Processes that are suspended at most: what they hold may not grow."""
MAY_GROW_BYTES = 32 << 20
MORE_DESCRIPTORS, MORE_THREADS = 24, 8
"""Pools of connections and agents breathe with the workers that come and go."""
KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "greedy")}
GREEDY = "max_sequences = 4\nmax_queued_requests = 2\ntokens_per_minute = 6000"


HELD_S = 1.0
"""For so long clients that read nothing stay connected."""


@dataclass(frozen=True)
class Size:
    """Size of one process."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


def _start(cluster: Cluster, model: Path, redis: RedisServer) -> None:
    keys = cluster.folder / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(key)}"\n{GREEDY if name == "greedy" else ""}\n'
            for name, key in KEYS.items()
        )
    )
    common = ("--model", str(model), "--redis", redis.url, "--redis-namespace=soak")
    for name in WORKERS:
        cluster.start_worker(role_of(name), *common, *FLAGS, name=name)
    cluster.start_router(*common, f"--api-keys-file={keys}")


async def _ask_too_much(client: InferenceClient, over: asyncio.Event) -> int:
    """A tenant that always has more to ask than its limits allow; returns how often it was refused."""
    num_refused = 0

    async def one(number: int) -> None:
        nonlocal num_refused
        try:
            await client.ask(prompt_of(60, number % 50), max_tokens=20, n=2)
        except grpc.aio.AioRpcError as error:
            if not isinstance(from_rpc_error(error), Overloaded):
                raise
            num_refused += 1
            await asyncio.sleep(0.2)

    number = 0
    while not over.is_set():
        await asyncio.gather(*(one(number + place) for place in range(6)))
        number += 6
    return num_refused


async def _disturb(
    cluster: Cluster, redis: RedisServer, loads: list[Load], draw: random.Random, until: float, whole: asyncio.Lock
) -> int:
    """One fault after the other, each with `whole` held; returns how many."""
    num_faults = 0
    while time.monotonic() < until:
        await asyncio.sleep(draw.uniform(2.0, 6.0))
        victim = cluster.services[draw.choice(WORKERS)]
        way = "SIGSTOP" if victim.name in KEPT else draw.choice(WAYS)
        async with whole:
            await _hurt(cluster, redis, loads, draw, victim, way)
        num_faults += 1
    return num_faults


async def _hurt(
    cluster: Cluster, redis: RedisServer, loads: list[Load], draw: random.Random, victim: Service, way: str
) -> None:
    with (
        loads[0].sessions_may_be_lost(victim.role == "decode"),
        loads[1].sessions_may_be_lost(victim.role == "decode"),
    ):
        if draw.random() < 0.1:
            redis.kill()
            await asyncio.sleep(1.0)
            await asyncio.to_thread(redis.start)
        await hurt(cluster, victim, way, draw)
        for load in loads:
            await load.answered()


def _read_nothing(cluster: Cluster, over: threading.Event) -> int:
    """In a thread: clients of every kind that read nothing, at the router's ports and the workers'; returns how often."""
    num_rounds = 0
    pings = OPENING + frame(PING, 0, 0, bytes(8)) * 10_000
    path = "/pdserve.v1.InferenceService/Generate"
    calls = OPENING + b"".join(
        frame(HEADERS, END_HEADERS | END_STREAM, stream, header_block(path)) for stream in range(1, 201, 2)
    )
    requests = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100
    while not over.wait(1.0):
        addresses = [cluster.services[name].address for name in KEPT]
        for address, content in [
            *((address, each) for address in addresses for each in (pings, calls)),
            (cluster.router.http, requests),
        ]:
            # a suspended worker may accept nothing; calls of clients that leave at once keep memory (docs/security.md)
            with contextlib.suppress(OSError), unread(address, [content] * 3):
                over.wait(HELD_S)
        num_rounds += 1
    return num_rounds


async def _report(cluster: Cluster, loads: list[Load], began: float) -> dict[str, Size]:
    sizes = {name: Size.of(service.process.pid) for name, service in cluster.services.items()}
    async with httpx.AsyncClient(trust_env=False) as http:
        response = await http.get(f"{cluster.metrics_url(cluster.router)}/metrics")
        page = response.raise_for_status().text
    indexed = re.search(r"^pdserve_indexed_blocks (\S+)$", page, re.MULTILINE)
    assert indexed is not None, page
    answers = sum(load.num_answers for load in loads)
    print(f"\n{time.monotonic() - began:6.0f} s  {answers} answers, {float(indexed[1]):.0f} blocks indexed")
    for name, size in sizes.items():
        blocks = ""
        if cluster.services[name].role != "router":
            load = await asyncio.to_thread(cluster.load, cluster.services[name])
            blocks = f"  blocks {load.blocks_in_use} in use, {load.blocks_cached} cached, {load.blocks_total} in all"
        print(
            f"  {name:<10} {size.rss_bytes / 2**20:7.1f} MiB {size.num_descriptors:4} descriptors "
            f"{size.num_threads:3} threads{blocks}",
            flush=True,
        )
    return sizes


async def test_nothing_grows_and_nothing_dies(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    draw = random.Random(os.environ.get("SOAK_SEED", "1"))
    with redis_server(tmp_path) as redis, running_cluster(tmp_path, PREPARED_WORKER) as cluster:
        _start(cluster, tiny_checkpoints("llama", num_hidden_layers=2), redis)
        address = cluster.router.address
        async with (
            InferenceClient(address, api_key=KEYS["alice"]) as alice,
            InferenceClient(address, api_key=KEYS["bob"]) as bob,
            InferenceClient(address, api_key=KEYS["greedy"]) as greedy,
        ):
            loads = [Load(alice, 1, num_clients=4), Load(bob, 2, num_clients=4)]
            for load in loads:
                await load.learn()
                load.begin()
            began, over, whole = time.monotonic(), asyncio.Event(), asyncio.Lock()
            asking = asyncio.create_task(_ask_too_much(greedy, over))
            readers_end = threading.Event()
            reading_nothing = asyncio.create_task(asyncio.to_thread(_read_nothing, cluster, readers_end))
            disturbing = asyncio.create_task(_disturb(cluster, redis, loads, draw, began + SOAK_S, whole))
            warm: dict[str, Size] = {}
            while not disturbing.done():
                await asyncio.wait({disturbing, asking}, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED)
                async with whole:
                    sizes = await _report(cluster, loads, began)
                if not warm and time.monotonic() - began >= SOAK_S / 4:
                    warm = sizes
                assert not asking.done(), asking.result()
            over.set()
            readers_end.set()
            for load in loads:
                await load.end()
            num_faults, num_refused, num_unread = await disturbing, await asking, await reading_nothing
        done = await _report(cluster, loads, began)
        print(
            f"{num_faults} faults, {num_refused} refusals of the greedy tenant, {num_unread} rounds of unread clients"
        )
        for name in KEPT:
            before, after = warm[name], done[name]
            assert after.rss_bytes < before.rss_bytes + MAY_GROW_BYTES, (name, before, after)
            assert after.num_descriptors <= before.num_descriptors + MORE_DESCRIPTORS, (name, before, after)
            assert after.num_threads <= before.num_threads + MORE_THREADS, (name, before, after)
        assert num_faults
        assert num_refused
        assert num_unread
        assert all(load.num_answers > SOAK_S / 10 for load in loads)
        check_whole(cluster)
