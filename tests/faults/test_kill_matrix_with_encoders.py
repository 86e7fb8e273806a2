"""The kill matrix with prompts that an encoder computes: images, sound, and models with an encoder and a decoder.

The router has images and sound until the request ends, and the prompt of an encoder anyway; what continues elsewhere goes through
an encoder again. Workers whose encoder cache is referenced while they have no request end with a traceback (`pausing_worker.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.v1 import inference_pb2
from tests.support.processes.phase_pauses import PhasePauses

from .conftest import Row
from .encoder_requests import MODELS, requests_of
from .worker_matrix import Matrix, hurt, running_matrix

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(240)]

CELLS = [
    ("queued", "prefill", "SIGKILL"),
    # after the first chunk of several, which may end within an image
    ("computing", "prefill", "SIGKILL"),
    ("computing", "prefill", "SIGSTOP"),
    ("computed", "prefill", "SIGKILL"),
    ("computed", "prefill", "SIGTERM"),
    ("computed", "decode", "SIGKILL"),
    ("moving", "prefill", "SIGKILL"),
    ("moving", "decode", "SIGKILL"),
    ("landed", "prefill", "SIGKILL"),
    ("landed", "decode", "SIGKILL"),
    ("first", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
    ("streaming", "decode", "SIGSTOP"),
]
IN_ONE_STEP = ("computing", "moving")
"""Phases that a prompt does not have which is computed, and published, at once."""
OF_SOUND = [
    ("queued", "prefill", "SIGKILL"),
    ("computed", "prefill", "SIGKILL"),
    ("computed", "decode", "SIGKILL"),
    ("landed", "prefill", "SIGKILL"),
    ("streaming", "decode", "SIGKILL"),
    ("streaming", "decode", "SIGTERM"),
    ("streaming", "decode", "SIGSTOP"),
]
"""Cells of Whisper, whose sequences are computed as those of BART and T5; its sound travels as images do."""


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "bart", "t5", "whisper"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    folder, pauses = tmp_path_factory.mktemp(request.param), PhasePauses(tmp_path_factory.mktemp("pauses"))
    model = MODELS[request.param](folder)
    flags, requests = ("--connector=tcp",), requests_of(request.param)
    with running_matrix(model, tmp_path_factory.mktemp("logs"), pauses, *flags, requests=requests) as made:
        yield made


@pytest.mark.parametrize(("phase", "role", "way"), CELLS, ids=["-".join(cell) for cell in CELLS])
async def test_i4_a_fault_in_any_phase_loses_nothing(
    matrix: Matrix, matrix_rows: list[Row], phase: str, role: str, way: str
) -> None:
    is_sound = isinstance(matrix.requests["greedy"][0], inference_pb2.AudioPrompt)
    if is_sound and (phase, role, way) not in OF_SOUND:
        pytest.skip("of sound there are few cells")
    if phase in IN_ONE_STEP and "same" not in matrix.requests:
        pytest.skip("a prompt of an encoder is computed in one step")
    await hurt(matrix, matrix_rows, phase, role, way)
