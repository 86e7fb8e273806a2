"""The kill matrix with drafts: decode workers draft with the model itself, so that nearly every step adds several tokens.

A worker dies, leaves or stops in a phase of a request; every answer must be that of an undisturbed run without drafts, wherever the
text goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.pausing_worker import PHASES

from .conftest import Row
from .worker_matrix import REQUESTS, Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    model = tiny_checkpoints("llama", num_hidden_layers=4)
    drafts = json.dumps({"model": str(model), "num_speculative_tokens": 3, "disable_by_batch_size": None})
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, f"--speculative-config={drafts}") as made:
        yield made


async def test_i5_the_undisturbed_run_is_the_undrafted_one(matrix: Matrix) -> None:
    async with InferenceClient(matrix.cluster.router.address) as client:
        for name, (prompt, params) in REQUESTS.items():
            answer = await client.ask(prompt, cache_salt="undrafted", speculative_tokens=0, **params)
            assert answer.token_ids == matrix.calm[name]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("role", "way"), [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("decode", "SIGTERM"), ("decode", "SIGSTOP")]
)
async def test_i4_a_fault_in_any_phase_loses_nothing_with_drafts(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
    cluster = matrix.cluster
    decoding = [service for service in cluster.services.values() if service.role == "decode"]
    name = "pdserve_spec_decode_num_accepted_tokens_total"
    assert sum(cluster.metric(worker, name) for worker in decoding) > 0, "nothing was drafted"
