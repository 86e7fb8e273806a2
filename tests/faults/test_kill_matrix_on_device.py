"""Workers whose pools are on a device, and rings where blocks land, are killed, stopped and given wrong bits (`device_worker.py`).

The cells of the kill matrix in which blocks are between a pool and its peer; every answer must be that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import REQUESTS, Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

CELLS = [
    ("computed", "prefill", "SIGKILL"),
    ("landing", "prefill", "SIGKILL"),
    ("landing", "decode", "SIGKILL"),
    ("landing", "decode", "SIGTERM"),
    ("landing", "decode", "SIGSTOP"),
]
TCP_CELLS = [
    ("moving", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGSTOP"),
    ("moving", "decode", "SIGKILL"),
    ("moving", "decode", "SIGSTOP"),
]
"""Over NIXL a source does not take part in a read."""


@dataclass
class DevicePauses(PhasePauses):
    """Pauses of workers with a pool on a device."""

    @property
    def worker_program(self) -> Sequence[str]:
        return (str(Path(__file__).parents[1] / "support/engine/device_worker.py"), str(self.folder))


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def matrix(
    request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = DevicePauses(tmp_path_factory.mktemp("pauses"))
    flags = (f"--connector={request.param}", "--kv-ring-mib=1")
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *flags) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_while_blocks_move_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)


@pytest.mark.parametrize("matrix", ["tcp"], indirect=True)
@pytest.mark.parametrize(("phase", "role", "way"), TCP_CELLS, ids=["-".join(cell) for cell in TCP_CELLS])
async def test_i4_a_fault_while_a_source_answers_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)


async def test_i3_a_wrong_bit_in_a_ring_is_read_again(matrix: Matrix) -> None:
    async with InferenceClient(matrix.cluster.router.address) as client:
        (matrix.pauses.folder / "flip").touch()
        assert await matrix.ask_all(client, "flip") == matrix.calm
        assert (matrix.pauses.folder / "flipped").exists()
        # what is cached now is right, too
        assert await matrix.ask_all(client, "flip") == matrix.calm
    matrix.cluster.check_pools()


async def test_i3_wrong_bits_that_stay_never_reach_a_pool(matrix: Matrix) -> None:
    """No transfer succeeds: each request ends with an error that says so, and no token is computed from wrong blocks."""
    always = matrix.pauses.folder / "flip_all"
    async with InferenceClient(matrix.cluster.router.address) as client:
        always.touch()
        try:
            asked = (matrix.ask(client, name, "damaged") for name in REQUESTS)
            for failure in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(failure, grpc.aio.AioRpcError)
                assert failure.code() is grpc.StatusCode.ABORTED
                assert "KV blocks could not be moved" in (failure.details() or "")
        finally:
            always.unlink()
        assert "does not match its digest" in "".join(
            service.read_log() for service in matrix.cluster.services.values()
        )
        assert await matrix.ask_all(client, "damaged") == matrix.calm
    matrix.cluster.check_pools()
