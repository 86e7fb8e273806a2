"""Workers that are killed, told to leave or stopped, in every phase of a request: the client notices nothing (I4).

Two prefill and two decode workers, float32. A worker pauses in the phase (`pausing_worker.py`), the victim gets its
signal, the pause ends. Four requests run; every answer must be that of an undisturbed run. `make test` runs a cell
of each phase, `make faults` all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pdserve.v1 import request_pb2
from tests.support.cluster_processes import Cluster, Service, running_cluster
from tests.support.inference_client import InferenceClient
from tests.support.pausing_worker import PHASES
from tests.support.phase_pauses import PhasePauses
from tests.support.random_prompts import prompt_of
from tests.support.waiting import HANG_S, eventually

from .conftest import Row

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

FLAGS = (
    "--set", "dtype=float32", "--set", "num_blocks=400", "--set", "max_num_batched_tokens=32",
    "--set", "connector=tcp", "--set", "drain_s=10",
)  # fmt: skip
SOON_S = 10.0
"""Twice what a worker's death or silence may take to be noticed."""
WAYS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
IN_EVERY_RUN = {
    ("queued", "prefill", "SIGKILL"),
    ("computing", "prefill", "SIGSTOP"),
    ("computed", "prefill", "SIGTERM"),
    ("moving", "decode", "SIGKILL"),
    ("landed", "decode", "SIGTERM"),
    ("first", "prefill", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in IN_EVERY_RUN else pytest.mark.faults, id="-".join(cell))
    for phase in PHASES
    for victim in ("prefill", "decode")
    for way in WAYS
    for cell in [(phase, victim, way)]
]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
FORM = request_pb2.StructuredOutputs(json=json.dumps(SCHEMA))
REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
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
    """A cluster that is hurt again and again."""

    cluster: Cluster
    pauses: PhasePauses
    calm: dict[str, list[int]] = field(default_factory=dict)
    """What an undisturbed run answered."""

    async def routing(self) -> list[dict[str, Any]]:
        """The router's last placements, newest first."""
        return await asyncio.to_thread(self._routing)

    def _routing(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://{self.cluster.router.http}/debug/routing", timeout=HANG_S) as answer:
            placements: list[dict[str, Any]] = json.load(answer)["placements"]
            return placements

    async def ask(self, client: InferenceClient, name: str, salt: str) -> list[int]:
        prompt, params = REQUESTS[name]
        return (await client.ask(prompt, cache_salt=salt, **params)).token_ids


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    with running_cluster(tmp_path_factory.mktemp("logs"), pauses.worker_program) as cluster:
        common = ("--model", str(model), *FLAGS)
        addresses: dict[str, Any] = {"prefill": [], "decode": []}
        places = (("prefill", 1), ("prefill", 2), ("decode", 1), ("decode", 2))
        for worker in [cluster.launch_worker(role, *common, name=f"{role}-{number}") for role, number in places]:
            cluster.wait_for_worker(worker)
            addresses[worker.role].append(worker.address)
        cluster.start_router(
            "--model", str(model), "--set", "policy=round_robin", "--local-prefill", "never", **addresses
        )
        matrix = Matrix(cluster, pauses)

        async def undisturbed() -> None:
            async with InferenceClient(cluster.router.address) as client:
                matrix.calm = {name: await matrix.ask(client, name, "calm") for name in REQUESTS}

        asyncio.run(undisturbed())
        yield matrix
        cluster.check_logs()


@pytest.mark.parametrize(("phase", "role", "way"), CELLS)
async def test_i4_a_fault_in_any_phase_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    cluster, salt = matrix.cluster, f"{phase}-{role}-{way}"
    log_before = len(cluster.router.read_log())
    async with InferenceClient(cluster.router.address) as client:
        known = {decision["request_id"] for decision in await matrix.routing()}
        matrix.pauses.arm(phase)
        asked = {name: asyncio.create_task(matrix.ask(client, name, salt)) for name in REQUESTS}
        pausing = await matrix.pauses.reached(cluster)
        new = [decision for decision in await matrix.routing() if decision["request_id"] not in known]
        held = next(decision for decision in new if decision[pausing.role] == pausing.name)
        victim = cluster.services[held[role]]
        since = time.monotonic()
        victim.signal(WAYS[way])
        if way == "SIGKILL":
            await asyncio.to_thread(victim.process.wait, HANG_S)
        matrix.pauses.go_on()
        answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        answered_s = time.monotonic() - since
        assert answers == matrix.calm
        assert answered_s < 2 * SOON_S
        matrix_rows.append(Row(phase, role, way, answered_s, await _attempts(matrix, known) - len(REQUESTS)))

        if way == "SIGSTOP":
            # answers that did not need it any more may be here before it has been missed
            await eventually(lambda: " is lost: its " in cluster.router.read_log()[log_before:], "it is missed")
            victim.signal(signal.SIGCONT)
        else:
            code = await asyncio.to_thread(victim.process.wait, HANG_S)
            assert code == (-signal.SIGKILL if way == "SIGKILL" else 0), victim.read_log()
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


async def _attempts(matrix: Matrix, known: set[str]) -> int:
    return sum(decision["request_id"] not in known for decision in await matrix.routing())


async def _used_again(matrix: Matrix, client: InferenceClient, victim: Service, salt: str) -> None:
    """It serves, and what lies in caches is still what was put there."""
    for name, expected in matrix.calm.items():
        assert await matrix.ask(client, name, salt) == expected
    deadline = time.monotonic() + HANG_S
    for turn in itertools.count():
        known = {decision["request_id"] for decision in await matrix.routing()}
        for name, expected in matrix.calm.items():  # under another salt nothing is cached
            assert await matrix.ask(client, name, f"{salt}-{turn}") == expected
        new = [decision for decision in await matrix.routing() if decision["request_id"] not in known]
        if any(decision[victim.role] == victim.name for decision in new):
            return
        assert time.monotonic() < deadline, f"{victim.name} is not used again"


@pytest.mark.parametrize("way", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.faults)])
async def test_the_only_decode_worker_lost_in_mid_stream_ends_the_request_clearly(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, way: str
) -> None:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = PhasePauses(tmp_path / "pauses")
    with running_cluster(tmp_path, pauses.worker_program) as cluster:
        prefill = cluster.start_worker("prefill", "--model", str(model), *FLAGS)
        decode = cluster.start_worker("decode", "--model", str(model), *FLAGS)
        cluster.start_router("--model", str(model), prefill=[prefill.address], decode=[decode.address])
        matrix = Matrix(cluster, pauses)
        async with InferenceClient(cluster.router.address) as client:
            expected = await matrix.ask(client, "greedy", "calm")
            matrix.pauses.arm("streaming")
            asked = asyncio.create_task(matrix.ask(client, "greedy", "hurt"))
            assert (await matrix.pauses.reached(cluster)).name == "decode"
            os.kill(decode.process.pid, WAYS[way])
            matrix.pauses.go_on()
            since = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
            assert time.monotonic() - since < 2 * SOON_S
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "decode" in (caught.value.details() or "")
            if way == "SIGSTOP":
                decode.signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(decode.process.wait, HANG_S)
                await asyncio.to_thread(cluster.restart, "decode")
            deadline = time.monotonic() + HANG_S
            while True:
                try:
                    assert await matrix.ask(client, "greedy", "again") == expected
                    break
                except grpc.aio.AioRpcError:
                    assert time.monotonic() < deadline, "decode is not used again"
        cluster.check_pools()
        cluster.check_logs()
