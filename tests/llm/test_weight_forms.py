"""Every stored form of weights in every way of serving: the texts of the same numbers stored as floats."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pdserve.llm import LLM, LoRARequest, SamplingParams
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.lora_adapters import make_adapter
from tests.support.models.quantized_checkpoints import FORMS, quantize_folder
from tests.support.transfers.pair_tokens import pair_tokens

SIZES: dict[str, Any] = {"intermediate_size": 128, "hidden_size": 128, "head_dim": 16, "num_attention_heads": 4}
EXPERT_SIZES = {"qwen3_moe": {"moe_intermediate_size": 64}}
"""For groups of 32 numbers."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [prompt_of(40, 1), prompt_of(7, 2), prompt_of(90, 3)]
WAYS: dict[str, dict[str, Any]] = {
    "offline": {},
    "two ranks": {"tensor_parallel_size": 2},
    "an adapter": {"enable_lora": True, "max_lora_rank": 8},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
}


@cache
def _folders(root: Path, architecture: str, name: str) -> tuple[Path, Path, Path]:
    """The checkpoint in this form, the numbers that it stands for, and an adapter."""
    place = root / f"{architecture}-{name}".replace(" ", "-").replace(",", "")
    sizes = SIZES | EXPERT_SIZES.get(architecture, {})
    folder = make_checkpoint(place / "stored", architecture, **sizes)
    plain = make_checkpoint(place / "plain", architecture, **sizes)
    save_file(quantize_folder(folder, FORMS[name]), plain / "model.safetensors", metadata={"format": "pt"})
    return folder, plain, make_adapter(place / "adapter", plain, spread=0.3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@pytest.mark.few(6)
@pytest.mark.diagonal
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("name", FORMS)
def test_texts(name: str, architecture: str, way: str, root: Path) -> None:
    if way == "an adapter" and architecture == "qwen3_moe":
        pytest.skip("experts take no adapters")
    folder, plain, adapter = _folders(root, architecture, name)
    request = LoRARequest("adapter", 1, str(adapter)) if way == "an adapter" else None
    texts = []
    for model in (folder, plain):
        with LLM(str(model), dtype="float32", **WAYS[way]) as llm:
            answers = llm.generate(PROMPTS, GREEDY, lora_request=request, use_tqdm=False)
            texts.append([answer.outputs[0].token_ids for answer in answers])
    assert texts[0] == texts[1]
    assert len({token for text in texts[0] for token in text}) > 5


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FORMS)
def test_prefill_and_decode(name: str, root: Path) -> None:
    folder, plain, _ = _folders(root, "llama", name)
    found = pair_tokens(folder, AutoModelForCausalLM.from_pretrained(plain).eval())
    assert found.equal == found.compared > 20
    assert found.distinct > 5
