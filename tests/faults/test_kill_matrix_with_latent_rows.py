"""The kill matrix with latent attention: one row per token and layer moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.models.family_checkpoints import make_latent_model
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("landed", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
    ("streaming", "decode", "SIGSTOP"),
]
TCP_CELLS = [("moving", "prefill", "SIGKILL"), ("moving", "prefill", "SIGSTOP"), ("moving", "decode", "SIGKILL")]
"""Over NIXL a source does not take part in a read."""


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    model = make_latent_model(tmp_path_factory.mktemp("deepseek"))
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, f"--connector={request.param}") as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_with_latent_rows(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)


@pytest.mark.parametrize("matrix", ["tcp"], indirect=True)
@pytest.mark.parametrize(("phase", "role", "way"), TCP_CELLS, ids=["-".join(cell) for cell in TCP_CELLS])
async def test_i4_a_fault_while_latent_rows_move_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
