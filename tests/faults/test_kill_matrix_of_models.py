"""The kill matrix with models whose KV cache has blocks of other kinds, whose numbers have 8 bits, and with real weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError
from pdserve.models.model_folder import model_folder
from tests.support.models.family_checkpoints import (
    make_chunked_model,
    make_latent_model,
    make_mixed_model,
    make_state_model,
    make_windowed_model,
)
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(400)]

Make = Callable[[Path], Path]
Cell = tuple[str, str, str]

SOURCE_KILLED, SOURCE_STOPPED = ("moving", "prefill", "SIGKILL"), ("moving", "prefill", "SIGSTOP")
RECEIVER_KILLED, RECEIVER_STOPPED = ("moving", "decode", "SIGKILL"), ("moving", "decode", "SIGSTOP")
COMPUTING, LANDED = ("computing", "prefill", "SIGKILL"), ("landed", "decode", "SIGKILL")
KILLED, TOLD, STOPPED = (("streaming", "decode", way) for way in ("SIGKILL", "SIGTERM", "SIGSTOP"))
DEATHS = (COMPUTING, SOURCE_KILLED, RECEIVER_KILLED, LANDED, KILLED)
DRAFTS = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "disable_by_batch_size": None}


def real(folder: Path) -> Path:
    """SmolLM2 in its GGUF file, in float32. Skips the test where its package is missing."""
    try:
        model_folder("smollm2")
    except ConfigError as error:
        pytest.skip(error.message)
    return Path("smollm2")


@dataclass(frozen=True)
class Kind:
    """A model, the flags of its workers, and which faults it meets."""

    make: Make | None
    """Writes it into a folder; None: a tiny Llama."""
    cells: Sequence[Cell]
    flags: Sequence[str] = ()
    connector: str = "tcp"


LATENT = (COMPUTING, LANDED, KILLED, TOLD, STOPPED)
KINDS = {
    # 56 blocks of a group; a request has up to 14 in the group without a window, and 2 to 4 in each other one: sequences free
    # blocks that have left their windows, and receivers reserve only those that they will see
    "windows": Kind(
        make_windowed_model,
        [
            COMPUTING, ("computing", "prefill", "SIGTERM"), SOURCE_STOPPED, RECEIVER_KILLED, ("moving", "decode", "SIGTERM"),
            RECEIVER_STOPPED, KILLED, TOLD, STOPPED,
        ],
        ["--num-blocks=14"],
    ),
    "chunks": Kind(make_chunked_model, [*DEATHS, STOPPED]),
    "latent": Kind(make_latent_model, [*LATENT, SOURCE_KILLED, SOURCE_STOPPED, RECEIVER_KILLED]),
    # a source does not take part in a read over NIXL
    "latent-nixl": Kind(make_latent_model, LATENT, connector="nixl"),
    "two-shapes": Kind(make_mixed_model, [*DEATHS, SOURCE_STOPPED, TOLD, STOPPED]),
    "states": Kind(make_state_model, [*DEATHS, TOLD], [f"--speculative-config={json.dumps(DRAFTS)}"]),
    "int8-weights": Kind(None, [*DEATHS, RECEIVER_STOPPED], ["--quantization=int8"]),
    "int8-cache": Kind(None, [*DEATHS, RECEIVER_STOPPED], ["--kv-cache-dtype=int8"]),
    "fp8-cache": Kind(None, [*DEATHS, RECEIVER_STOPPED], ["--kv-cache-dtype=fp8"]),
    "real-weights": Kind(real, [*DEATHS, STOPPED], ["--quantization=auto"]),
    "real-weights-widened": Kind(real, [*DEATHS, STOPPED], ["--quantization=none"]),
}  # fmt: skip
CELLS = [
    pytest.param(name, *cell, id=f"{name}-{'-'.join(cell)}") for name, kind in KINDS.items() for cell in kind.cells
]


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tiny_checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    kind = KINDS[request.param]
    if kind.connector == "nixl":
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    if kind.make is None:
        model = tiny_checkpoints("llama", num_hidden_layers=4)
    else:
        model = kind.make(tmp_path_factory.mktemp(request.param))
    pauses, flags = PhasePauses(tmp_path_factory.mktemp("pauses")), (f"--connector={kind.connector}", *kind.flags)
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *flags) as made:
        yield made


@pytest.mark.parametrize(("matrix", "phase", "role", "way"), CELLS, indirect=["matrix"])
async def test_i4_a_fault_in_a_phase_loses_nothing_whatever_the_model(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    await hurt(matrix, matrix_rows, phase, role, way)
