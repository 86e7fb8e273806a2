"""The kill matrix with drafts, of the model itself as the one that drafts, so that nearly every step adds several tokens, and of a
draft head, whose blocks move with the others.

A worker dies, leaves or stops in a phase of a request; every answer must be that of an undisturbed run without drafts, wherever the
text goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.draft_heads import DraftHeadModel
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.pausing_worker import PHASES
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import REQUESTS, Matrix, hurt, running_matrix, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]


WAYS = [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("decode", "SIGTERM"), ("decode", "SIGSTOP")]
HEAD_CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("computed", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGSTOP"),
    ("moving", "decode", "SIGKILL"),
    ("landed", "decode", "SIGKILL"),
    ("first", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
    ("streaming", "decode", "SIGSTOP"),
]


def drafts(**fields: Any) -> str:
    return f"--speculative-config={json.dumps({'num_speculative_tokens': 3, 'disable_by_batch_size': None, **fields})}"


@pytest.fixture(scope="module", params=["model", "head"])
def matrix(
    request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    if request.param == "model":
        model = tiny_checkpoints("llama", num_hidden_layers=4)
        with tiny_matrix(tiny_checkpoints, tmp_path_factory, drafts(model=str(model))) as made:
            yield made
        return
    model = DraftHeadModel(tmp_path_factory.mktemp("heads")).folder
    pauses = PhasePauses(tmp_path_factory.mktemp("pauses"))
    flags = ("--connector=tcp", drafts(method="mtp"))
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *flags) as made:
        yield made


async def test_i5_the_undisturbed_run_is_the_undrafted_one(matrix: Matrix) -> None:
    async with InferenceClient(matrix.cluster.router.address) as client:
        for name, (prompt, params) in REQUESTS.items():
            answer = await client.ask(prompt, cache_salt="undrafted", speculative_tokens=0, **params)
            assert answer.token_ids == matrix.calm[name]


@pytest.mark.parametrize("matrix", ["model"], indirect=True)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("role", "way"), WAYS)
async def test_i4_a_fault_in_any_phase_loses_nothing_with_drafts(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
    check_drafted(matrix)


@pytest.mark.parametrize("matrix", ["head"], indirect=True)
@pytest.mark.parametrize(("phase", "role", "way"), HEAD_CELLS, ids=["-".join(cell) for cell in HEAD_CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_with_a_draft_head(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
    check_drafted(matrix)


def check_drafted(matrix: Matrix) -> None:
    """Drafts were right at some decode worker."""
    cluster = matrix.cluster
    decoding = [service for service in cluster.services.values() if service.role == "decode"]
    name = "pdserve_spec_decode_num_accepted_tokens_total"
    assert sum(cluster.metric(worker, name) for worker in decoding) > 0, "nothing was drafted"
