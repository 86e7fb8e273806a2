"""Workers that change their role under load: texts, caches and streams stay (I1, I4, I16)."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.v1 import worker_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.draft_heads import DraftHeadModel
from tests.support.models.family_checkpoints import make_mixed_model, make_state_model
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually, wait_until

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=512")
LONG = "--max-model-len=2048"
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@contextmanager
def four_workers(
    folder: Path, model: Path, *flags: str, router: Sequence[str] = ("--local-prefill=never",)
) -> Iterator[Cluster]:
    """Two prefill and two decode workers, and a router. flags: of workers."""
    with running_cluster(folder) as cluster:
        workers = [
            cluster.launch_worker(name.partition("-")[0], "--model", str(model), *FLAGS, *flags, name=name)
            for name in NAMES
        ]
        for worker in workers:
            cluster.wait_for_worker(worker)
        addresses = [worker.address for worker in workers]
        cluster.start_router("--model", str(model), *router, prefill=addresses[:2], decode=addresses[2:])
        wait_until(lambda: live(cluster) == (2, 2), "the router knows all workers")
        yield cluster
        cluster.check_pools()
        cluster.check_logs()


async def pdserve(cluster: Cluster, *words: str) -> tuple[int | None, str]:
    """A command of the command line to the router: its status, and what it says."""
    command = [sys.executable, "-m", "pdserve.cli.main", *words, "--url", f"http://{cluster.router.http}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    return process.returncode, output.decode()


async def switch(cluster: Cluster, name: str, role: str, router: str = "") -> None:
    """Over HTTP, without waiting for anything. router: host:port."""
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:
        url = f"http://{router or cluster.router.http}/workers/{name}/role"
        answer = await http.post(url, json={"role": role})
    assert answer.status_code == 202, answer.text


def role_of(cluster: Cluster, name: str) -> str:
    return worker_pb2.Role.Name(cluster.load(cluster.services[name]).role).removeprefix("ROLE_").lower()


async def finish(stream: Any, answer: list[int]) -> None:
    async for message in stream:
        answer.extend(message.token_ids)


@pytest.mark.slow
async def test_i1_i16_streams_and_caches_stay(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    router = ("--local-prefill=never", "--policy=round_robin", "--block-moves=never")
    with four_workers(tmp_path, model, "--connector=tcp", LONG, router=router) as cluster:
        await _streams_and_caches(cluster, oracle)


async def _streams_and_caches(cluster: Cluster, oracle: Oracle) -> None:
    prompts = [prompt_of(40 + 7 * number, seed=number) for number in range(8)]
    leaving = cluster.services["decode-0"]
    async with InferenceClient(cluster.router.address) as client:
        streams = [aiter(client.start(prompt, max_tokens=700)) for prompt in prompts]
        answers = [list((await anext(stream)).token_ids) for stream in streams]
        # a first token may come from the prefill call, before the blocks are here
        await eventually(lambda: cluster.load(leaving).num_running == 4)
        before = cluster.load(leaving)
        status, said = await pdserve(cluster, "role", "decode-0", "prefill")
        assert (status, said.splitlines()[-1]) == (0, "decode-0 is a prefill worker")
        after = cluster.load(leaving)
        assert (after.role, after.num_running, after.num_other_calls) == (worker_pb2.ROLE_PREFILL, 0, 0)
        assert after.blocks_cached >= before.blocks_in_use
        for stream, answer, prompt in zip(streams, answers, prompts, strict=True):
            await finish(stream, answer)
            oracle.check(prompt, answer)
        assert cluster.metric(cluster.router, "pdserve_migrations_total", 'outcome="moved"') == 4
        assert "blocks were not copied ahead" not in cluster.router.read_log()
        assert cluster.metric(cluster.router, "pdserve_attempts_total", 'outcome="ok"') == 8
        assert cluster.metric(cluster.router, "pdserve_workers", 'role="prefill",state="live"') == 3
        assert cluster.metric(leaving, "pdserve_role_switches_total", 'role="prefill"') == 1

        # what it had received as a decode worker it does not compute as a prefill worker
        computed = cluster.metric(leaving, "pdserve_prompt_tokens_by_source_total", 'source="computed"')
        thrice = [prompt for prompt in prompts for _ in range(3)]
        for prompt, again in zip(thrice, await client.ask_all(thrice, max_tokens=4), strict=True):
            oracle.check(prompt, again.token_ids)
        calls = cluster.metric(cluster.router, "pdserve_placed_calls_total", 'role="prefill",worker="decode-0"')
        assert calls == 8
        hits = cluster.metric(leaving, "pdserve_prompt_tokens_by_source_total", 'source="pool"')
        assert hits >= 4 * 32
        new = cluster.metric(leaving, "pdserve_prompt_tokens_by_source_total", 'source="computed"') - computed
        assert new < sum(map(len, prompts)), "half of the prompts were here, each to its last block"

        # and back: the command waits for its prefills
        status, said = await pdserve(cluster, "role", "decode-0", "decode")
        assert (status, said.splitlines()[-1]) == (0, "decode-0 is a decode worker")
        for again, prompt in zip(await client.ask_all(prompts, max_tokens=30), prompts, strict=True):
            oracle.check(prompt, again.token_ids)
        calls = cluster.metric(cluster.router, "pdserve_placed_calls_total", 'role="decode",worker="decode-0"')
        assert calls >= 8
        status, said = await pdserve(cluster, "top", "--once")
        assert status == 0
        assert {line.split()[1] for line in said.splitlines() if line.startswith("prefill-")} == {"prefill"}

        # a worker that has switched drains as any other
        await switch(cluster, "prefill-1", "decode")
        streams = [aiter(client.start(prompt, max_tokens=400)) for prompt in prompts]
        answers = [list((await anext(stream)).token_ids) for stream in streams]
        status, said = await pdserve(cluster, "drain", "prefill-1")
        assert (status, said.splitlines()[-1]) == (0, "prefill-1 has left")
        for stream, answer, prompt in zip(streams, answers, prompts, strict=True):
            await finish(stream, answer)
            oracle.check(prompt, answer)
        status, said = await pdserve(cluster, "role", "prefill-0", "decode")
        assert status == 1
        assert "prefill-0 is the only prefill worker that is live: force is needed" in said


KINDS: dict[str, tuple[Any, Sequence[str]]] = {
    "tcp": (None, ("--connector=tcp",)),
    "nixl": (None, ("--connector=nixl",)),
    "engine process": (None, ("--connector=tcp", "--engine-process=true")),
    "ranks": (None, ("--connector=tcp", "--tensor-parallel-size=2")),
    "states": (lambda folder: make_state_model(folder, "qwen3_next"), ("--connector=tcp",)),
    "two shapes": (make_mixed_model, ("--connector=tcp",)),
    "ngrams": (
        None, ("--connector=tcp", "--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3}))
    ),
    "draft head": (
        lambda folder: DraftHeadModel(folder).folder,
        (
            "--connector=tcp",
            f"--speculative-config={json.dumps({'method': 'mtp', 'num_speculative_tokens': 1, 'disable_by_batch_size': None})}",
        ),
    ),
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "tcp" else pytest.mark.slow) for kind in KINDS]
)
async def test_i4_i16_back_and_forth_under_load(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    make, flags = KINDS[kind]
    model = tiny_checkpoints("llama") if make is None else make(tmp_path / "model")
    # models that are made here take fewer tokens
    longest, flags = (200, (*flags, LONG)) if make is None else (60, flags)
    with four_workers(tmp_path, model, *flags) as cluster:
        await _back_and_forth(cluster, 20, longest)


async def _back_and_forth(cluster: Cluster, times: int, longest: int) -> None:
    """The same requests, first without a change and then with changes all the time. longest: tokens of a prompt."""
    draw = random.Random(times)
    requests: list[tuple[list[int], dict[str, Any]]] = [
        (prompt_of(draw.randint(1, longest), seed=number),
         {"max_tokens": draw.choice((1, 20, 60)), "seed": number, "temperature": draw.choice((0.0, 0.9))})
        for number in range(24)
    ]  # fmt: skip
    roles = {name: name.partition("-")[0] for name in NAMES}
    async with InferenceClient(cluster.router.address) as client:

        async def ask(number: int) -> list[int]:
            prompt, sampling = requests[number]
            return (await client.ask(prompt, timeout=4 * HANG_S, **sampling)).token_ids

        expected = [await ask(number) for number in range(len(requests))]
        stop = asyncio.Event()

        async def load(first: int) -> int:
            number = 0
            while not stop.is_set():
                place = (first + number) % len(requests)
                assert await ask(place) == expected[place], requests[place]
                number += 1
            return number

        clients = [asyncio.create_task(load(first)) for first in range(6)]
        try:
            for _ in range(times):
                name = draw.choice(NAMES)
                role = {"prefill": "decode", "decode": "prefill"}[roles[name]]
                if list(roles.values()).count(roles[name]) > 1:
                    await switch(cluster, name, role)
                    roles[name] = role
                await asyncio.sleep(draw.uniform(0.05, 0.4))
        finally:
            stop.set()
        assert sum(await asyncio.gather(*clients)) > 20
        for name, role in roles.items():
            assert role_of(cluster, name) == role
        await eventually(lambda: not any(cluster.load(cluster.services[name]).num_other_calls for name in NAMES))
        assert cluster.metric(cluster.router, "pdserve_migrations_total", 'outcome="failed"') == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_i4_a_worker_that_dies_while_its_role_changes(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    draw = random.Random(3)
    with four_workers(tmp_path, model, "--connector=tcp", LONG) as cluster:
        async with InferenceClient(cluster.router.address) as client:
            for turn in range(4):
                name = ("decode-0", "prefill-0")[turn % 2]
                prompts = [prompt_of(30 + 9 * number, seed=10 * turn + number) for number in range(8)]
                streams = [aiter(client.start(prompt, timeout=4 * HANG_S, max_tokens=300)) for prompt in prompts]
                answers = [list((await anext(stream)).token_ids) for stream in streams]
                more = [asyncio.create_task(client.ask(prompt_of(200, seed=turn), timeout=4 * HANG_S, max_tokens=20))]
                await switch(cluster, name, "prefill" if name.startswith("decode") else "decode")
                await asyncio.sleep(draw.uniform(0.0, 0.1))
                cluster.services[name].signal(signal.SIGKILL)
                for stream, answer, prompt in zip(streams, answers, prompts, strict=True):
                    await finish(stream, answer)
                    oracle.check(prompt, answer)
                await asyncio.gather(*more)
                await asyncio.to_thread(cluster.services[name].process.wait, HANG_S)
                # it comes back in the role with which it is started
                await asyncio.to_thread(cluster.restart, name)
                assert role_of(cluster, name) == name.partition("-")[0]
                await eventually(lambda: live(cluster) == (2, 2))


def live(cluster: Cluster) -> tuple[int, int]:
    """Prefill and decode workers that the router may use."""
    health = httpx.get(f"http://{cluster.router.http}/health", timeout=HANG_S, trust_env=False).json()
    return health["workers"]["prefill"]["live"], health["workers"]["decode"]["live"]


async def test_two_routers_agree_about_a_role(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with four_workers(tmp_path, model, "--connector=tcp", LONG) as cluster:
        await switch(cluster, "decode-1", "prefill")
        addresses = [cluster.services[name].address for name in NAMES]
        flags = ("--model", str(model), "--local-prefill=never")
        other = cluster.start_router(*flags, prefill=addresses[:2], decode=addresses[2:], name="other")
        async with InferenceClient(other.address) as late, InferenceClient(cluster.router.address) as first:
            for turn in range(2):
                prompts = [prompt_of(60 + number, seed=100 * turn + number) for number in range(6)]
                answers = await asyncio.gather(
                    *((late, first)[number % 2].ask(prompt, max_tokens=20) for number, prompt in enumerate(prompts))
                )
                for prompt, answer in zip(prompts, answers, strict=True):
                    oracle.check(prompt, answer.token_ids)
                counts = [cluster.metric(each, "pdserve_workers", 'role="prefill",state="live"')
                          for each in (other, cluster.router)]  # fmt: skip
                assert counts == [3 - turn] * 2
                if not turn:
                    await switch(cluster, "decode-1", "decode", other.http)
                    await eventually(lambda: live(cluster) == (2, 2))
