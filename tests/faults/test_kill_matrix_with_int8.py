"""The kill matrix with int8 weights, and with a KV cache of 8-bit numbers, whose blocks have rows of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Row
from .worker_matrix import Matrix, hurt, tiny_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

CELLS = [
    ("computing", "prefill", "SIGKILL"),
    ("moving", "prefill", "SIGKILL"),
    ("moving", "decode", "SIGKILL"),
    ("moving", "decode", "SIGSTOP"),
    ("landed", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
]


@pytest.fixture(scope="module", params=["quantization=int8", "kv_cache_dtype=int8", "kv_cache_dtype=fp8"])
def matrix(
    request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    with tiny_matrix(tiny_checkpoints, tmp_path_factory, f"--{request.param}") as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_a_phase_loses_nothing_with_8_bit_numbers(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
