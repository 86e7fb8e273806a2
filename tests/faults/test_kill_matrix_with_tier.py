"""The kill matrix with pools of two prompts, host memory for four, and a disk or a shared store for all: loads, preemptions and
transfers at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.mooncake_master import mooncake_master
from tests.support.processes.pausing_worker import PHASES
from tests.support.run.waiting import HANG_S

from .conftest import Row
from .worker_matrix import Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

SMALL_POOL = ("--num-blocks=30", "--kv-host-mib=1")
"""The matrix's requests have up to 14 blocks each."""


@pytest.fixture(scope="module", params=["disk", "store"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[str]]:
    """Settings of a worker for what lies below host memory."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "disk":
        yield f"--kv-disk-path={folder}", "--kv-disk-gib=0.05"
        return
    with mooncake_master(folder) as master:
        yield "--kv-store", master.url(segment_mib=16)


@pytest.fixture(scope="module")
def matrix(
    tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, store: Sequence[str]
) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, *SMALL_POOL, *store) as made:
        yield made
        workers = [service for service in made.cluster.services.values() if service.role != "router"]
        counts = {
            name: sum(made.cluster.metric(worker, f"pdserve_kv_store_blocks_{name}_total") for worker in workers)
            for name in ("written", "read", "failed")
        }
    assert counts["written"] > 0, counts
    assert counts["read"] > 0, counts


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("role", "way"), [("prefill", "SIGKILL"), ("decode", "SIGKILL"), ("decode", "SIGSTOP")])
async def test_i4_a_fault_beside_loads_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
    async with InferenceClient(matrix.cluster.router.address) as client:
        await _loaded(matrix, client, f"{phase}-{role}-{way}")
        # asked for in each test, with others between that take pools and host memory, and with deaths
        assert await matrix.ask_all(client, "in-each-test") == matrix.calm
    matrix.cluster.check_pools()


async def _loaded(matrix: Matrix, client: InferenceClient, salt: str) -> None:
    """Ask for prompts again that others have driven out of the pools, until blocks are loaded: every answer is the undisturbed one.

    Raises: AssertionError if none is.
    """
    workers = [service for service in matrix.cluster.services.values() if service.role != "router"]
    give_up_at = time.monotonic() + HANG_S
    for turn in itertools.count():
        assert time.monotonic() < give_up_at, "all that was asked for again was in the pools"
        for each in ("again", f"other-{turn}"):
            assert await matrix.ask_all(client, f"{salt}-{each}") == matrix.calm
        if sum(matrix.cluster.metric(worker, "pdserve_kv_host_blocks_loaded_total") for worker in workers):
            return
