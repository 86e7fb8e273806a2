"""Workers of two ranks each, of which one is killed in every phase of a request, and whole workers, too (I4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes.pausing_worker import PHASES

from .conftest import Row
from .worker_matrix import RANK, Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(300)]

CELLS = [(phase, role, RANK) for phase in PHASES for role in ("prefill", "decode")]
WHOLE = [("moving", "prefill", "SIGKILL"), ("moving", "decode", "SIGKILL"), ("streaming", "decode", "SIGSTOP")]


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, "--tensor-parallel-size=2") as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), [*CELLS, *WHOLE])
async def test_i4_a_fault_in_any_phase_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
