"""SmolLM2 and Gemma 3 with their own weights, from GGUF files: the texts of transformers on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pdserve.llm import LLM, SamplingParams
from pdserve.models.read_config import read_config
from pdserve.models.weights.open_weights import open_weights
from tests.support.models.real_weights import NAMES, real_folder

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
TEXTS = [
    "The capital of France is",
    "Water boils at 100 degrees",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a miller who had three sons. The eldest",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,",
    "Der Zug fährt von Berlin nach",
]
NEAR = 2e-4
"""Difference of two logits below which either may win."""


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return real_folder(request.param)


@pytest.fixture(scope="module")
def oracle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    copy = tmp_path_factory.mktemp("copy")
    with open_weights(folder, None) as weights:
        save_file(
            {name: weights.read(name, weights.shape(name)).contiguous() for name in weights.names},
            copy / "model.safetensors", metadata={"format": "pt"},
        )  # fmt: skip
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    yield AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    (copy / "model.safetensors").unlink()


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_texts_are_those_of_transformers(folder: Path, oracle: Any, quantization: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), dtype="float32", quantization=quantization, max_num_seqs=8) as llm:
        answers = llm.generate(TEXTS, params, use_tqdm=False)
    for answer in answers:
        prompt, tokens = list(answer.prompt_token_ids or ()), list(answer.outputs[0].token_ids)
        assert len(tokens) == NUM_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits[torch.arange(NUM_TOKENS), torch.tensor(tokens)]
        assert (best - chosen).max() < NEAR, answer.outputs[0].text


def test_weights_take_the_memory_of_their_integers(folder: Path) -> None:
    from pdserve.engine.runner.pool.memory_needs import weight_bytes

    whole, small = (weight_bytes(folder, "bfloat16", quantization=form) for form in (None, "stored"))
    config = read_config(folder)
    # it is the head, too, and stays in bfloat16
    embedding = 2 * config.vocab_size * config.hidden_size
    assert small - embedding < 0.7 * (whole - embedding)
