"""Many clients whose prompts an encoder computes: most leave in some phase, and workers die under them."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.image_checkpoints import picture
from tests.support.processes.cluster_processes import Cluster, running_cluster
from tests.support.processes.inference_client import InferenceClient, Prompt
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.run.waiting import HANG_S, eventually

from .encoder_requests import MODELS, chat

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(400)]

FLAGS = (
    "--dtype=float32",
    "--num-blocks=200",
    "--max-num-batched-tokens=64",
    "--connector=tcp",
)
NUM_REQUESTS, AT_ONCE = 400, 48
MAX_TOKENS = 40


def prompts_of(model: str) -> list[Prompt]:
    if "vl" not in model:
        return [prompt_of(length, length) for length in (1, 16, 17, 40, 60, 93)]
    return [
        chat("one ", picture(1)),
        chat(picture(1), picture(2, 64, 48), " and ", picture(3, 8, 8)),
        chat("twice ", picture(4, 64, 64), picture(4, 64, 64)),
        chat("none"),
        chat(picture(5, 120, 8), "thin"),
        chat("last ", picture(2, 64, 48)),
    ]


@pytest.mark.parametrize("with_deaths", [False, True], ids=["aborts", "aborts-and-deaths"])
@pytest.mark.parametrize("model", ["qwen2_5_vl", "bart"])
async def test_i4_i7_a_storm_leaves_nothing_behind(tmp_path: Path, model: str, with_deaths: bool) -> None:
    """A client that leaves has got the beginning of the answer of an undisturbed run."""
    draw = random.Random(23)
    prompts, gate = prompts_of(model), asyncio.Semaphore(AT_ONCE)
    expected: list[list[int]] = []
    num_left = num_answered = 0

    async def one(client: InferenceClient, number: int) -> None:
        nonlocal num_left, num_answered
        place, max_tokens = number % len(prompts), draw.choice((1, 2, 10, MAX_TOKENS))
        salt, patience_s = draw.choice(("", f"{number}")), draw.choice((None, 0.0, 0.002, 0.01, 0.05, 0.2, 0.5))
        async with gate:
            tokens, has_ended = await client.ask_within(
                patience_s, prompts[place], cache_salt=salt, max_tokens=max_tokens
            )
            if has_ended:
                assert len(tokens) == max_tokens
                num_answered += 1
            else:
                num_left += 1
            assert tokens == expected[place][: len(tokens)]

    async def more_ends(number: int) -> None:
        await eventually(lambda: num_left + num_answered >= number or storm.done(), f"{number} ends")

    folder = MODELS[model](tmp_path / "model")
    with running_cluster(tmp_path, PhasePauses(tmp_path / "pauses").worker_program) as cluster:
        _start(cluster, folder)
        async with InferenceClient(cluster.router.address) as client:
            answers = await client.ask_all(prompts, max_tokens=MAX_TOKENS)
            expected += [answer.token_ids for answer in answers]
            storm = asyncio.gather(*(one(client, number) for number in range(NUM_REQUESTS)))
            for name in ("prefill-1", "decode-1", "prefill-2", "decode-2") if with_deaths else ():
                await more_ends(num_left + num_answered + 20)
                victim = cluster.services[name]
                victim.signal(signal.SIGKILL)
                await asyncio.to_thread(victim.process.wait, HANG_S)
                await asyncio.to_thread(cluster.restart, name)
            await storm
            # 57 clients have all patience, 64 none
            assert num_left >= 50
            assert num_answered >= 50
            again = await client.ask_all(prompts, cache_salt="again", max_tokens=MAX_TOKENS)
            assert [answer.token_ids for answer in again] == expected
        cluster.check_pools()
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            assert cluster.load(cluster.services[name]).blocks_quarantined == 0
        cluster.check_logs()


def _start(cluster: Cluster, model: Path) -> None:
    """Two workers of each role and a router, without a prefill at decode."""
    addresses: dict[str, Any] = {"prefill": [], "decode": []}
    workers = [
        cluster.launch_worker(role, "--model", str(model), *FLAGS, name=f"{role}-{number}")
        for role in ("prefill", "decode")
        for number in (1, 2)
    ]
    for worker in workers:
        cluster.wait_for_worker(worker)
        addresses[worker.role].append(worker.address)
    flags = ("--policy=round_robin", "--local-prefill", "never")
    cluster.start_router("--model", str(model), *flags, **addresses)
