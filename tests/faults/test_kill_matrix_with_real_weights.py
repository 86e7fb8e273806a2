"""The kill matrix with SmolLM2's own weights in float32, from its GGUF file: no text changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.model_folder import model_folder
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(400)]

CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGKILL"),
    ("moving", "decode", "SIGKILL"),
    ("landed", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGSTOP"),
]


@pytest.fixture(scope="module", params=["auto", "none"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    try:
        model_folder("smollm2")
    except ConfigError as error:
        pytest.skip(error.message)
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    flags = ("--connector=tcp", f"--quantization={request.param}")
    with running_matrix(Path("smollm2"), tmp_path_factory.mktemp("logs"), pauses, *flags) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_of_a_real_model(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
