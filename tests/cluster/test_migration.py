"""I16: sequences that leave a decode worker, because it drains or all the time, through a router."""

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

from pdserve.v1 import request_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.draft_heads import DraftHeadModel
from tests.support.models.family_checkpoints import (
    make_chunked_model,
    make_gemma4_model,
    make_latent_model,
    make_mixed_model,
    make_state_model,
    make_windowed_model,
)
from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.run.waiting import HANG_S, eventually

pytestmark = pytest.mark.process

FLAGS = ("--dtype=float32", "--num-blocks=512", "--connector=tcp")
LENGTH = 80
FORM = request_pb2.StructuredOutputs(regex="[A-C]{2}-[0-9]{30,60}(x|yz)")


@contextmanager
def two_decode_workers(
    folder: Path, model: Path, *flags: str, router: Sequence[str] = ()
) -> Iterator[tuple[Cluster, Service, Service]]:
    """The cluster, a router whose sequences stay, and one whose sequences move all the time. flags: of workers."""
    with running_cluster(folder) as cluster:
        workers = [
            cluster.launch_worker(role, "--model", str(model), *FLAGS, *flags, name=name)
            for role, name in (("prefill", "prefill"), ("decode", "decode-0"), ("decode", "decode-1"))
        ]
        for worker in workers:
            cluster.wait_for_worker(worker)
        addresses: dict[str, Any] = {"prefill": [workers[0].address], "decode": [each.address for each in workers[1:]]}
        common = ("--model", str(model), "--policy=round_robin", "--local-prefill=never", *router)
        stays = cluster.start_router(*common, **addresses)
        moves = cluster.start_router(*common, "--rebalance=always", **addresses, name="moves")
        yield cluster, stays, moves
        cluster.check_pools()
        cluster.check_logs()


async def drain(cluster: Cluster, name: str) -> str:
    """`pdserve drain`; returns what it says."""
    command = [sys.executable, "-m", "pdserve.cli.main", "drain", name, "--url", f"http://{cluster.router.http}"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_i16_streams_leave_a_worker_that_drains(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoints("llama")
    oracle = Oracle(model)
    with two_decode_workers(tmp_path, model, "--max-model-len=2048") as (cluster, _, _):
        await _leave(cluster, oracle)


async def _leave(cluster: Cluster, oracle: Oracle) -> None:
    prompts = [prompt_of(40 + 7 * number, seed=number) for number in range(8)]
    url = f"http://{cluster.router.http}"
    async with InferenceClient(cluster.router.address) as router, httpx.AsyncClient(trust_env=False) as http:
        streams = [aiter(router.start(prompt, max_tokens=700)) for prompt in prompts]
        answers = [list((await anext(stream)).token_ids) for stream in streams]
        drained = await http.post(f"{url}/workers/decode-0/drain", json={}, timeout=HANG_S)
        assert drained.json()["draining"][0]["num_calls"] == 4
        for stream, answer, prompt in zip(streams, answers, prompts, strict=True):
            async for message in stream:
                answer.extend(message.token_ids)
            oracle.check(prompt, answer)
        cluster.services["decode-0"].process.wait(HANG_S)
        kinds = [
            placed["kind"] for placed in (await http.get(f"{url}/debug/routing", timeout=HANG_S)).json()["placements"]
        ]
        assert (kinds.count("migration"), kinds.count("remote")) == (4, 8)
        assert cluster.metric(cluster.router, "pdserve_migrations_total", 'outcome="moved"') == 4
        assert "did not copy its blocks" not in cluster.router.read_log()
        assert cluster.metric(cluster.router, "pdserve_attempts_total", 'outcome="ok"') == 8
        assert "decode-1 has left" in await drain(cluster, "decode-1")
        cluster.services["decode-1"].process.wait(HANG_S)


def asked(draw: random.Random) -> dict[str, Any]:
    """Parameters of a request whose answer a move could change."""
    return draw.choice(
        [
            {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": draw.choice([None, 2])},
            {"temperature": 0.9, "n": 3, "top_p": 0.9, "logprobs": 1},
            {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
            {"temperature": 0.7, "structured_outputs": FORM},
            {"temperature": 1.0, "stop": [draw.choice("abcdefgh")], "min_tokens": 5, "ignore_eos": False},
            {"temperature": 1.0, "logit_bias": {7: 3.0}, "bad_words": ["a"], "top_k": 20, "min_p": 0.01},
        ]
    )


async def said(client: InferenceClient, prompt: Sequence[int], sampling: dict[str, Any]) -> dict[int, list[Any]]:
    """Of each sequence: token ids, text, log-probabilities, finish reason."""
    answers: dict[int, list[Any]] = {}
    async for message in client.start(prompt, timeout=4 * HANG_S, **sampling):
        answer = answers.setdefault(message.index, [[], "", [], 0])
        answer[0] += message.token_ids
        answer[1] += message.text
        answer[2] += [each.sampled.logprob for each in message.logprobs]
        answer[3] = message.finish_reason or answer[3]
    return answers


def texts(answers: dict[int, list[Any]]) -> dict[int, tuple[Any, ...]]:
    """Without log-probabilities."""
    return {index: (token_ids, text, reason) for index, (token_ids, text, _, reason) in answers.items()}


async def compare(cluster: Cluster, stays: Service, moves: Service, least: int) -> None:
    """Ask both routers the same until so many sequences have moved."""

    def count(outcome: str) -> float:
        return cluster.metric(moves, "pdserve_migrations_total", f'outcome="{outcome}"')

    draw = random.Random(5)
    async with InferenceClient(stays.address) as still, InferenceClient(moves.address) as moving:
        number = 0
        while count("moved") < least:
            requests = []
            for _ in range(6):
                number += 1
                given = {"max_tokens": LENGTH, "seed": number, "ignore_eos": True} | asked(draw)
                given = {name: value for name, value in given.items() if value is not None}
                requests.append((prompt_of(draw.randint(1, 60), seed=number), given))
            expected = await asyncio.gather(*(said(still, *request) for request in requests))
            found = await asyncio.gather(*(said(moving, *request) for request in requests))
            for request, right, seen in zip(requests, expected, found, strict=True):
                assert texts(seen) == texts(right), request
                for index, each in right.items():
                    # other sequences are in their steps, so that sums are rounded in another order
                    assert seen[index][2] == pytest.approx(each[2], abs=1e-3), request
    assert count("failed") <= least / 20
    assert "did not copy its blocks" not in moves.read_log()


MODELS: dict[str, tuple[Any, Sequence[str]]] = {
    "llama": (None, ()),
    "latent": (make_latent_model, ()),
    "states": (make_state_model, ()),
    "gated delta net": (lambda folder: make_state_model(folder, "qwen3_next"), ()),
    "windows": (make_windowed_model, ()),
    "chunks": (make_chunked_model, ()),
    "two shapes": (make_mixed_model, ()),
    "gemma4": (make_gemma4_model, ()),
    "draft head": (
        lambda folder: DraftHeadModel(folder).folder,
        (
            f"--speculative-config={json.dumps({'method': 'mtp', 'num_speculative_tokens': 1, 'disable_by_batch_size': None})}",
        ),
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind != "llama" else ()) for kind in MODELS]
)
@pytest.mark.timeout(600)
async def test_i16_sequences_that_move_at_random_moments_say_the_same(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    make, flags = MODELS[kind]
    model = tiny_checkpoints("llama") if make is None else make(tmp_path / "model")
    with two_decode_workers(tmp_path, model, *flags) as (cluster, stays, moves):
        await compare(cluster, stays, moves, least=40)


@pytest.mark.parametrize("on_kv_failure", [pytest.param("local", marks=pytest.mark.slow), "fail"])
@pytest.mark.timeout(600)
async def test_i16_moves_that_fail_cost_no_answer(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, on_kv_failure: str
) -> None:
    """In pools of two or three sequences their blocks are often reused before they are wanted."""
    model = tiny_checkpoints("llama")
    flags, router = ("--num-blocks=34",), ("--max-attempts=1", f"--on-kv-failure={on_kv_failure}")
    with two_decode_workers(tmp_path, model, *flags, router=router) as (_, stays, moves):
        requests = [
            (prompt_of(150 + 10 * number, seed=number), {"max_tokens": LENGTH, "ignore_eos": True, "seed": number})
            for number in range(8)
        ]
        async with InferenceClient(stays.address) as still, InferenceClient(moves.address) as moving:
            expected = [await said(still, *request) for request in requests]
            give_up_at = asyncio.get_running_loop().time() + HANG_S
            while moves.read_log().count("were reused before they were wanted") < 5:
                assert asyncio.get_running_loop().time() < give_up_at, "no move has failed"
                found = await asyncio.gather(*(said(moving, *request) for request in requests))
                assert list(map(texts, found)) == list(map(texts, expected))


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_i16_a_thousand_moves(tiny_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    with two_decode_workers(tmp_path, tiny_checkpoints("llama")) as (cluster, stays, moves):
        await compare(cluster, stays, moves, least=1000)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_i4_i16_workers_that_leave_while_sequences_move(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, how: str
) -> None:
    """A sequence is resumed wherever its move was cut off, and one worker is always there."""
    draw = random.Random(how)
    flags = ("--max-model-len=1024",)
    with two_decode_workers(tmp_path, tiny_checkpoints("llama"), *flags) as (cluster, stays, moves):
        async with InferenceClient(stays.address) as still, InferenceClient(moves.address) as moving:
            for turn in range(8):
                given = [{"max_tokens": 400, "seed": turn * 8 + number, "ignore_eos": True} for number in range(6)]
                requests = [
                    (
                        prompt_of(draw.randint(1, 60), seed=each["seed"]),
                        each | {"temperature": 0.9 * (number % 2), "n": 1 + number % 3},
                    )
                    for number, each in enumerate(given)
                ]
                expected = await asyncio.gather(*(said(still, *request) for request in requests))
                tasks = [asyncio.create_task(said(moving, *request)) for request in requests]
                name = draw.choice(["decode-0", "decode-1"])
                await asyncio.sleep(draw.uniform(0.1, 0.6))
                leaving = cluster.services[name]
                leaving.signal(getattr(signal, how))
                found = await asyncio.gather(*tasks)
                for request, right, seen in zip(requests, expected, found, strict=True):
                    assert texts(seen) == texts(right), request
                await asyncio.to_thread(leaving.process.wait, HANG_S)
                await asyncio.to_thread(cluster.restart, name)
                await eventually(lambda: all(live(router) == 2 for router in (stays, moves)))
        assert cluster.metric(moves, "pdserve_migrations_total", 'outcome="moved"') > 20


def live(router: Service) -> int:
    """Decode workers that a router may use."""
    health = httpx.get(f"http://{router.http}/health", timeout=HANG_S, trust_env=False).json()
    count: int = health["workers"]["decode"]["live"]
    return count
