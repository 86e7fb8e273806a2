"""A cluster of two prefill and two decode workers that is hurt again and again, and what it must still answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from pdserve.v1 import inference_pb2, request_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.processes.cluster_processes import Cluster, Service, running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.processes.prepared_children import ENGINE_PROCESS, RANK_1
from tests.support.run.waiting import HANG_S, eventually

from .conftest import Row

FLAGS = (
    "--dtype=float32", "--num-blocks=400", "--max-num-batched-tokens=32", "--drain-s=10",
)  # fmt: skip
SOON_S = 10.0
"""Twice what a worker's death or silence may take to be noticed."""
OTHER = "other decode"
RANK = "SIGKILL of rank 1"
"""Kills a rank of a worker with two ranks, which then ends by itself."""
WAYS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
FORM = request_pb2.StructuredOutputs(json=json.dumps(SCHEMA))
Requested = tuple[list[int] | inference_pb2.ChatPrompt | inference_pb2.AudioPrompt, dict[str, Any]]
"""Prompt and sampling parameters."""
REQUESTS: dict[str, Requested] = {
    "greedy": (prompt_of(200, 1), {"max_tokens": 24}),
    "seeded": (prompt_of(170, 2), {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11}),
    "penalties": (
        prompt_of(133, 3),
        {"max_tokens": 24, "repetition_penalty": 1.2, "min_tokens": 24, "temperature": 0.0},
    ),
    "form": (prompt_of(90, 4), {"max_tokens": 24, "temperature": 0.8, "seed": 12, "structured_outputs": FORM}),
}


@dataclass
class Matrix:
    """A cluster, its pauses, and what an undisturbed run answered."""

    cluster: Cluster
    pauses: PhasePauses
    calm: dict[str, list[int]] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    """Request -> its adapter; the base model for others."""
    requests: Mapping[str, Requested] = field(default_factory=lambda: REQUESTS)

    async def routing(self) -> list[dict[str, Any]]:
        """The router's last placements, newest first."""
        return await asyncio.to_thread(self._routing)

    def _routing(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://{self.cluster.router.http}/debug/routing", timeout=HANG_S) as answer:
            placements: list[dict[str, Any]] = json.load(answer)["placements"]
            return placements

    async def ask(self, client: InferenceClient, name: str, salt: str) -> list[int]:
        prompt, params = self.requests[name]
        return (await client.ask(prompt, cache_salt=salt, model=self.models.get(name, ""), **params)).token_ids

    async def ask_all(self, client: InferenceClient, salt: str) -> dict[str, list[int]]:
        """All requests at once."""
        answers = await asyncio.gather(*(self.ask(client, name, salt) for name in self.requests))
        return dict(zip(self.requests, answers, strict=True))


@contextmanager
def running_matrix(
    model: Path,
    folder: Path,
    pauses: PhasePauses,
    *flags: str,
    models: Mapping[str, str] | None = None,
    router: Sequence[str] = (),
    requests: Mapping[str, Requested] = REQUESTS,
) -> Iterator[Matrix]:
    """The cluster, after an undisturbed run. flags: of the workers. models: request -> its adapter. router: flags of the router."""
    with running_cluster(folder, pauses.worker_program) as cluster:
        common = ("--model", str(model), *FLAGS, *flags)
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        places = (("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2))
        for worker in [cluster.launch_worker(role, *common, name=f"{role}-{number}") for role, number in places]:
            cluster.wait_for_worker(worker)
            addresses[worker.role].append(worker.address)
        cluster.start_router(
            "--model", str(model), "--policy=round_robin", "--local-prefill", "never", *router, **addresses
        )
        matrix = Matrix(cluster, pauses, models=models or {}, requests=requests)

        async def undisturbed() -> None:
            async with InferenceClient(cluster.router.address) as client:
                matrix.calm = {name: await matrix.ask(client, name, "calm") for name in requests}

        asyncio.run(undisturbed())
        yield matrix
        cluster.check_logs()


@contextmanager
def tiny_matrix(
    tiny_checkpoints: Callable[..., Path],
    folders: pytest.TempPathFactory,
    *flags: str,
    models: Mapping[str, str] | None = None,
    router: Sequence[str] = (),
) -> Iterator[Matrix]:
    """A matrix of a tiny model over TCP. flags, models, router: as of `running_matrix`."""
    model, pauses = tiny_checkpoints("llama", num_hidden_layers=4), PhasePauses(folders.mktemp("pauses"))
    flags = ("--connector=tcp", *flags)
    with running_matrix(model, folders.mktemp("logs"), pauses, *flags, models=models, router=router) as made:
        yield made


def other_decode(name: str) -> str:
    """Of the two decode workers the one of another name."""
    [other] = {"decode-1", "decode-2"} - {name}
    return other


def engine_process_of(worker: Service) -> int:
    """The id of the process of a worker's engine."""
    return _child_of(worker, ENGINE_PROCESS)


def rank_1_of(worker: Service) -> int:
    """The id of the process of a worker's rank 1."""
    return _child_of(worker, RANK_1)


def _child_of(worker: Service, name: str) -> int:
    [process] = [child for child in psutil.Process(worker.process.pid).children() if child.name() == name]
    return process.pid


async def hurt(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str, *, only_engine: bool = False
) -> None:
    """Send a signal to a worker while a request is in a phase: every answer is that of an undisturbed run, and the worker is used
    again afterwards. role: `OTHER` is the decode worker that does not pause. only_engine: the signal goes to the process of its
    engine alone."""
    cluster = matrix.cluster
    log_before = len(cluster.router.read_log())
    async with InferenceClient(cluster.router.address) as client:
        known, salt, asked, pausing = await _ask_until_paused(matrix, client, phase, f"{phase}-{role}-{way}")
        new = [decision for decision in await matrix.routing() if decision["request_id"] not in known]
        held = next(decision for decision in new if decision[pausing.role] == pausing.name)
        if role == OTHER:
            name = other_decode(pausing.name)
        else:
            # a sequence that has moved is placed without prefill: the prefill worker of another one is hurt
            name = held[role] or next(decision[role] for decision in new if decision[role])
        victim = cluster.services[name]
        since = time.monotonic()
        target = engine_process_of(victim) if only_engine else victim.process.pid
        if way == RANK:
            target = rank_1_of(victim)
        os.kill(target, signal.SIGKILL if way == RANK else WAYS[way])
        if way in ("SIGKILL", RANK):  # no longer than that: the worker that pauses must not be missed, too
            await eventually(lambda: _has_ended(target), "the end of what was killed")
        matrix.pauses.go_on()
        answers = await asked
        answered_s = time.monotonic() - since
        assert answers == matrix.calm
        assert answered_s < 2 * SOON_S
        matrix_rows.append(Row(phase, role, way, answered_s, await _attempts(matrix, known) - len(answers)))

        if way == "SIGSTOP":
            # answers that did not need it any more may be here before it has been missed
            await eventually(lambda: " is lost: its " in cluster.router.read_log()[log_before:], "it is missed")
            os.kill(target, signal.SIGCONT)
        else:
            code = await asyncio.to_thread(victim.process.wait, HANG_S)
            killed = 1 if only_engine else -signal.SIGKILL
            assert code == {"SIGKILL": killed, RANK: 1}.get(way, 0), victim.read_log()
            await asyncio.to_thread(cluster.restart, victim.name)
        await _used_again(matrix, client, victim, salt)
    log = cluster.router.read_log()[log_before:]
    # a busy machine may keep the router from running: it says so, and it is no fault
    warnings = [line for line in log.splitlines() if " WARNING " in line and "the event loop was blocked" not in line]
    if way != "SIGTERM":  # who leaves is no fault
        assert len(warnings) == 1, warnings
        assert f"{victim.name} " in warnings[0]
        assert "is lost: its " in warnings[0]
    cluster.check_pools()


class _Asked(NamedTuple):
    """The requests that were asked when a worker paused."""

    known: set[str]
    """Ids of those before."""
    salt: str
    answers: asyncio.Task[dict[str, list[int]]]
    pausing: Service


async def _ask_until_paused(matrix: Matrix, client: InferenceClient, phase: str, salt: str) -> _Asked:
    """Ask all requests, under one salt after another, until a worker pauses.

    A request has no phase `moving` where decode's first read comes after the last chunk and takes all blocks at once.
    """
    matrix.pauses.arm(phase)
    give_up_at = time.monotonic() + HANG_S
    turn = 0
    while True:
        assert time.monotonic() < give_up_at, f"no request comes to the phase {phase}"
        known = {decision["request_id"] for decision in await matrix.routing()}
        turn_salt = f"{salt}-asked-{turn}"
        answers = asyncio.create_task(matrix.ask_all(client, turn_salt))
        if pausing := await matrix.pauses.reached_unless(matrix.cluster, answers.done):
            return _Asked(known, turn_salt, answers, pausing)
        assert await answers == matrix.calm
        turn += 1


def _has_ended(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def _attempts(matrix: Matrix, known: set[str]) -> int:
    return sum(decision["request_id"] not in known for decision in await matrix.routing())


async def _used_again(matrix: Matrix, client: InferenceClient, victim: Service, salt: str) -> None:
    """Check that the worker serves, and that cached blocks still have the bytes that were put there."""
    assert await matrix.ask_all(client, salt) == matrix.calm
    deadline = time.monotonic() + HANG_S
    for turn in itertools.count():
        known = {decision["request_id"] for decision in await matrix.routing()}
        # under another salt nothing is cached
        assert await matrix.ask_all(client, f"{salt}-{turn}") == matrix.calm
        new = [decision for decision in await matrix.routing() if decision["request_id"] not in known]
        if any(decision[victim.role] == victim.name for decision in new):
            return
        assert time.monotonic() < deadline, f"{victim.name} is not used again"
