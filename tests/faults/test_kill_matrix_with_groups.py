"""The kill matrix with KV cache groups: sequences free blocks behind their windows while others are computed again elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.models.family_checkpoints import make_windowed_model
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

SMALL_POOL = ("--connector=tcp", "--num-blocks=14")
"""56 blocks of a group; a request of the matrix has up to 14 in the group without a window, and 2 to 4 in each other one."""
CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("computing", "prefill", "SIGTERM"),
    ("moving", "prefill", "SIGSTOP"),
    ("moving", "decode", "SIGKILL"),
    ("moving", "decode", "SIGTERM"),
    ("moving", "decode", "SIGSTOP"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
    ("streaming", "decode", "SIGSTOP"),
]
"""Phases in which a sequence frees blocks behind its windows, or a receiver reserves only those that it will see."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = make_windowed_model(tmp_path_factory.mktemp("gemma3"))
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *SMALL_POOL) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_with_groups(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
