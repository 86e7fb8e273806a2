"""Workers of two ranks each, of which one is killed in every phase of a request, and whole workers, too (I4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pausing_worker import PHASES
from tests.support.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import RANK, Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(300)]

TWO_RANKS = ("--set", "connector=tcp", "--set", "tensor_parallel_size=2")
CELLS = [(phase, role, RANK) for phase in PHASES for role in ("prefill", "decode")]
WHOLE = [("moving", "prefill", "SIGKILL"), ("moving", "decode", "SIGKILL"), ("streaming", "decode", "SIGSTOP")]


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *TWO_RANKS) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), [*CELLS, *WHOLE])
async def test_i4_a_fault_in_any_phase_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
