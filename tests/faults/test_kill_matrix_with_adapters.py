"""The kill matrix with adapters: four requests, three adapters and the base model, two slots per worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.models.lora_adapters import adapter_flags
from tests.support.processes.pausing_worker import PHASES

from .conftest import Row
from .worker_matrix import Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(180)]
MODELS = {"greedy": "one", "seeded": "two", "penalties": "three"}
"""Request -> adapter; the fourth has the base model."""
CELLS = [(phase, victim, way) for phase in PHASES for victim, way in (("prefill", "SIGKILL"), ("decode", "SIGKILL"))]


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    flags = adapter_flags(tmp_path_factory.mktemp("adapters"), model, *MODELS.values())
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, *flags, models=MODELS) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_death_in_any_phase_changes_no_answer(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
