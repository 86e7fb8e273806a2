"""The load format `dummy`: a model of which only config.json is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.pool.memory_needs import weight_bytes
from pdserve.llm import LLM, SamplingParams
from pdserve.models.loading import LoadProgress, load_decoder
from pdserve.models.weights.dummy_weights import DummyWeights
from tests.support.models.checkpoints import ARCHITECTURES, make_checkpoint

TOKENS = [3, 14, 15, 92, 65]


def _without_weights(folder: Path, architecture: str = "llama", **fields: Any) -> Path:
    make_checkpoint(folder, architecture, **fields)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_computes_finite_numbers(architecture: str, tmp_path: Path, paged_run: Any) -> None:
    folder = _without_weights(tmp_path / "model", architecture)
    one, two = (paged_run(load_decoder(folder, load_format="dummy")).step({}, {"a": TOKENS})["a"] for _ in range(2))
    assert one.isfinite().all()
    assert one.std() > 0
    assert torch.equal(one, two)


@pytest.mark.parametrize("tied", [True, False])
def test_progress_and_sizes_are_those_of_the_checkpoint(tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    seen: dict[str, list[LoadProgress]] = {"auto": [], "dummy": []}
    for load_format, progress in seen.items():
        load_decoder(folder, load_format=load_format, progress=progress.append)
    assert [each.name for each in seen["dummy"]] == [each.name for each in seen["auto"]]
    assert seen["dummy"][-1].loaded_bytes == seen["dummy"][-1].total_bytes == seen["auto"][-1].total_bytes
    assert weight_bytes(folder, "float32", "dummy") == weight_bytes(folder, "float32")


def test_numbers_depend_on_the_name_alone() -> None:
    weights = DummyWeights(Path("model"), torch.bfloat16, "cpu")
    other = DummyWeights(Path("elsewhere"), torch.bfloat16, "cpu")
    other.read("b.weight", (8, 8))
    one = weights.read("a.weight", (64, 64))
    assert one.dtype is torch.bfloat16
    assert torch.equal(one, other.read("a.weight", (64, 64)))
    assert not torch.equal(one, weights.read("b.weight", (64, 64)))
    assert 0.018 < one.float().std() < 0.022
    assert weights.read("norm.weight", (4,)).tolist() == [1, 1, 1, 1]
    assert weights.read("q_proj.bias", (2,)).tolist() == [0, 0]


def test_workers_with_other_weights_share_no_blocks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    fingerprints = [
        load_model(
            folder, WorkerSettings(model=str(folder), num_blocks=4, load_format=load_format)
        ).layout.model_fingerprint
        for load_format in ("auto", "dummy", "dummy")
    ]
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]


def test_a_folder_without_weights_generates(tmp_path: Path) -> None:
    folder = _without_weights(tmp_path / "model")
    with LLM(folder, load_format="dummy", num_blocks=16) as llm:
        [output] = llm.generate(["The river"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
