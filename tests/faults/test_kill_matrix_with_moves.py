"""The kill matrix while all sequences move between the decode workers, and cached blocks to whoever computes (I16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes.pausing_worker import PHASES, PHASES_OF_MOVES

from .chaos_load import MOVES
from .conftest import Row
from .worker_matrix import OTHER, WAYS, Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

CELLS = [
    pytest.param(phase, role, way, marks=() if (phase, role, way) in IN_EVERY_RUN else pytest.mark.faults)
    for IN_EVERY_RUN in [{("left", OTHER, "SIGKILL"), ("arrived", OTHER, "SIGTERM")}]
    for phase in PHASES_OF_MOVES
    for role in ("decode", OTHER)
    for way in WAYS
] + [
    pytest.param(phase, role, way, marks=pytest.mark.faults)
    for phase in PHASES
    for role, way in (("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("decode", "SIGTERM"))
]


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, router=MOVES) as made:
        yield made
        assert made.cluster.metric(made.cluster.router, "pdserve_migrations_total", 'outcome="moved"') > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("phase", "role", "way"), CELLS)
async def test_i4_i16_a_fault_while_sequences_move_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
