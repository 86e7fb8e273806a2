"""Each form of stored weights in each way of serving: greedy tokens, compared with those of the same numbers stored as floats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pdserve.llm import LLM, LoRARequest, SamplingParams
from pdserve.models.model_folder import model_folder
from pdserve.models.weights.open_weights import open_weights
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_checkpoints import write_gguf
from tests.support.models.lora_adapters import ALL_LINEARS, make_adapter
from tests.support.models.quantized_checkpoints import FORMS, quantize_folder
from tests.support.transfers.pair_tokens import pair_tokens

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3_moe": {"moe_intermediate_size": 64}}
"""Sizes in addition to `SIZES`: groups of 32 numbers need them."""
OF_GGUF = ("Q4_0", "Q5_1", "Q8_0", "F16")
NAMES = (*FORMS, *(f"GGUF {kind}" for kind in OF_GGUF))
PAIR = "prefill and decode"
_OFFLINE: Mapping[str, dict[str, Any]] = {
    "offline": {},
    "two ranks": {"tensor_parallel_size": 2},
    "an adapter": {"enable_lora": True, "max_lora_rank": 8},
    "drafts": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
        }
    },
}  # fmt: skip
WAYS = (*_OFFLINE, PAIR)
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_PROMPTS = [prompt_of(40, 1), prompt_of(7, 2), prompt_of(90, 3)]


class Tokens(NamedTuple):
    equal: int
    compared: int


def compare(name: str, architecture: str, way: str, root: Path) -> Tokens:
    """name: of `NAMES`. root: a folder for models, the same for all calls. Raises: AssertionError for answers that show nothing."""
    folder, plain, adapter = _folders(root, architecture, name)
    if way == PAIR:
        found = pair_tokens(folder, AutoModelForCausalLM.from_pretrained(plain).eval())
        assert found.distinct > 5
        return Tokens(found.equal, found.compared)
    request = LoRARequest("adapter", 1, str(adapter)) if way == "an adapter" else None
    texts = []
    for model in (folder, plain):
        with LLM(str(model), dtype="float32", **_OFFLINE[way]) as llm:
            answers = llm.generate(_PROMPTS, _GREEDY, lora_request=request, use_tqdm=False)
            texts.append([token for answer in answers for token in answer.outputs[0].token_ids])
    assert len(set(texts[1])) > 5
    return Tokens(sum(one == other for one, other in zip(*texts, strict=True)), len(texts[1]))


@cache
def _folders(root: Path, architecture: str, name: str) -> tuple[Path, Path, Path]:
    """The checkpoint in this form, the numbers that it stands for, and an adapter."""
    place = root / f"{architecture}-{name}".replace(" ", "-").replace(",", "")
    sizes = SIZES | ARCHITECTURES[architecture]
    folder = make_checkpoint(place / "stored", architecture, **sizes)
    plain = make_checkpoint(place / "plain", architecture, **sizes)
    if name in FORMS:
        meant = quantize_folder(folder, FORMS[name])
    else:
        kind = gguf.GGMLQuantizationType[name.removeprefix("GGUF ")]
        file = write_gguf(place / "model.gguf", folder, architecture.replace("_", ""), kind=kind, name=str(place))
        folder = model_folder(str(file))
        with open_weights(folder, None) as weights:
            meant = {weight: weights.read(weight, weights.shape(weight)).contiguous() for weight in weights.names}
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    targets = _ATTENTION if "moe" in architecture else ALL_LINEARS
    return folder, plain, make_adapter(place / "adapter", plain, spread=0.3, targets=targets)
