"""The kill matrix with a stream per call, as to workers of earlier releases (`step_streams` off)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pausing_worker import PHASES

from .conftest import Row
from .worker_matrix import Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, router=("--step-streams=false",)) as made:
        yield made


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("role", "way"), [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("decode", "SIGTERM"), ("decode", "SIGSTOP")]
)
async def test_i4_a_fault_loses_nothing_of_calls_over_separate_streams(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
