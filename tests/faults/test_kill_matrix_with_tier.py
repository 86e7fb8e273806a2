"""The kill matrix with pools of two prompts and a host-memory tier behind them: loads, preemptions and transfers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pausing_worker import PHASES

from .conftest import Row
from .worker_matrix import Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

SMALL_POOL = ("--set", "num_blocks=30", "--set", "kv_host_mib=8")
"""The matrix's requests have up to 14 blocks each."""


@pytest.fixture(scope="module")
def matrix(tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, *SMALL_POOL) as made:
        yield made


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("role", "way"), [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("decode", "SIGSTOP")])
async def test_i4_a_fault_beside_loads_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
    cluster = matrix.cluster
    workers = [service for service in cluster.services.values() if service.role != "router"]
    loaded = sum(cluster.metric(worker, "pdserve_kv_host_blocks_loaded_total") for worker in workers)
    assert loaded > 0, "all that was asked for again was in the pools"
