"""Workers whose engine has a process of its own, which is killed or stopped alone, in phases of a request (I4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Row
from .worker_matrix import Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

PHASES = ("computing", "moving", "landed", "streaming")


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, "--engine-process=true") as made:
        yield made


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase", PHASES)
async def test_i4_an_engine_process_that_is_lost_alone_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way, only_engine=True)


@pytest.mark.parametrize("phase", PHASES)
async def test_i4_a_worker_that_is_killed_takes_its_engine_process_with_it(
    matrix: Matrix, matrix_rows: list[Row], phase: str
) -> None:
    await hurt(matrix, matrix_rows, phase, "decode", "SIGKILL")
