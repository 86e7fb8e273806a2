"""Workers that are killed, told to leave or stopped, in every phase of a request: the client notices nothing (I4).

Two prefill and two decode workers, float32. A worker pauses in the phase (`pausing_worker.py`), the victim gets its
signal, the pause ends. Four requests run; every answer must be that of an undisturbed run. `make test` runs a cell
of each phase, `make faults` all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest

from tests.support.processes.cluster_processes import running_cluster
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.pausing_worker import PHASES
from tests.support.processes.phase_pauses import PhasePauses
from tests.support.run.waiting import HANG_S

from .conftest import Row
from .worker_matrix import FLAGS, SOON_S, WAYS, Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

OVER_TCP = ("--connector=tcp",)
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


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory) as made:
        yield made


@pytest.mark.few(1)
@pytest.mark.parametrize(("phase", "role", "way"), CELLS)
async def test_i4_a_fault_in_any_phase_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.faults)])
async def test_the_only_decode_worker_lost_in_mid_stream_ends_the_request_clearly(
    tiny_checkpoints: Callable[..., Path], tmp_path: Path, way: str
) -> None:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = PhasePauses(tmp_path / "pauses")
    with running_cluster(tmp_path, pauses.worker_program) as cluster:
        prefill = cluster.start_worker("prefill", "--model", str(model), *FLAGS, *OVER_TCP)
        decode = cluster.start_worker("decode", "--model", str(model), *FLAGS, *OVER_TCP)
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
