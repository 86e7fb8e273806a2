"""The kill matrix with blocks of two shapes, each with a data plane of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.models.family_checkpoints import make_mixed_model
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGSTOP"),
    ("moving", "decode", "SIGKILL"),
    ("landed", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
    ("streaming", "decode", "SIGSTOP"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = make_mixed_model(tmp_path_factory.mktemp("mimo"))
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, "--connector=tcp") as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_with_blocks_of_two_shapes(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
