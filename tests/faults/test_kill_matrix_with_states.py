"""The kill matrix with states: two per sequence move, and most layers have no keys. Decode workers draft."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.models.family_checkpoints import make_state_model
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGKILL"),
    ("moving", "decode", "SIGKILL"),
    ("landed", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = make_state_model(tmp_path_factory.mktemp("lfm2"))
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    drafts = json.dumps({"num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": None})
    options = ("--connector=tcp", f"--speculative-config={drafts}")
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *options) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_with_states(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
