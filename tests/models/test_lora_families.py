"""Adapters of families that differ from Llama's layers, against `transformers` with the adapter merged into the weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.loading import load_decoder
from pdserve.models.lora.lora_adapter import read_adapter
from pdserve.models.lora.lora_targets import with_lora_targets
from pdserve.models.weights.rank_shard import WHOLE, RankShard
from tests.support.engine.thread_ranks import on_all_ranks
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.lora_adapters import make_adapter, merged_checkpoint

ATOL = 3e-4
TOKENS = list(range(30, 62))
FUSED = {
    "glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
"""Family -> modules of its layers."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULES = FUSED | dict.fromkeys(
    ("dots1", "ernie4_5_moe", "glm4_moe", "minimax_m2", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open"), ATTENTION
)
"""The same of families with experts, which take no adapters."""
LLAMAS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def logits_with(base: Path, adapter: Path | None, shard: RankShard = WHOLE) -> Tensor:
    """Logits `[n, V]` of `TOKENS`: a chunk, then single tokens. shard: of a rank above 0 there are none, `[n, 0]`."""
    decoder, targets = with_lora_targets(load_decoder(base, shard=shard), max_loras=2, max_rank=8, shard=shard)
    if adapter is not None:
        targets.put(1, read_adapter(adapter, targets).weights)
    run, found, slot = PagedRun(decoder, shard=shard), [], np.array([-1 if adapter is None else 1])
    targets.ops.set_rows(slot, np.array([20]))
    found.append(run.step({}, {"a": TOKENS[:20]})["a"])
    targets.ops.set_rows(slot, np.array([1]))
    found += [run.step({"a": token}, {})["a"] for token in TOKENS[20:]]
    return torch.cat(found)


def oracle_logits(model: Any, tokens: Sequence[int] = TOKENS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family",
    [
        *FUSED,
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("ernie4_5_moe", "gemma3_text", "glm4_moe", "granite", "minimax_m2", "olmo2", "qwen2_moe")
        ),
    ],
)
def test_logits_are_those_of_the_merged_weights(
    family: str, plain_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = plain_checkpoint(family)
    adapter = make_adapter(tmp_path / "adapter", base, targets=MODULES.get(family, LLAMAS), spread=0.2)
    merged = merged_checkpoint(tmp_path / "merged", base, adapter)
    expected = oracle_logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval())
    found = logits_with(base, adapter)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=ATOL)
    assert (found - logits_with(base, None)).abs().max() > 100 * ATOL, "an adapter without effect would prove nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("phi3", 2),
        ("qwen3", 4),
        *(pytest.param(f, 2, marks=pytest.mark.slow) for f in ("glm4", "minimax_m2", "qwen3_moe")),
    ],
)
def test_ranks_have_the_logits_of_one(
    family: str, size: int, plain_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also with fewer heads of keys and values than ranks."""
    base = plain_checkpoint(family)
    adapter = make_adapter(tmp_path, base, targets=MODULES.get(family, LLAMAS), spread=0.2)
    alone = logits_with(base, adapter)
    first, *others = on_all_ranks(size, lambda rank: logits_with(base, adapter, RankShard(rank.rank, rank.size, rank)))
    torch.testing.assert_close(first, alone, atol=ATOL, rtol=ATOL)
    assert all(not other.numel() for other in others)


def test_parts_of_a_fused_projection_are_refused_by_name(
    plain_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = plain_checkpoint("phi3")
    _, targets = with_lora_targets(load_decoder(base), max_loras=1, max_rank=8)
    make_adapter(tmp_path, base, targets=FUSED["phi3"])
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    fused = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"
    whole = tensors[fused]
    tensors[fused] = whole[1:].contiguous()
    save_file(tensors, path)
    with pytest.raises(
        ConfigError, match=rf"has shape \[{len(whole) - 1}, 4\], the model and r need \[{len(whole)}, 4\]"
    ):
        read_adapter(tmp_path, targets)
    tensors[fused.replace("qkv_proj", "q_proj")] = whole
    del tensors[fused]
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match="there are qkv_proj, o_proj, gate_up_proj, down_proj of each layer"):
        read_adapter(tmp_path, targets)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3", "falcon_h1", "gemma4_text", "jamba", "kimi_linear", "lfm2", "llama4_text", "mamba", "mimo_v2_flash",
        "nemotron_h", "qwen3_next",
    ],
)  # fmt: skip
def test_attention_of_another_kind_is_refused_by_name(family: str, plain_checkpoint: Callable[[str], Path]) -> None:
    decoder = load_decoder(plain_checkpoint(family))
    with pytest.raises(UnsupportedModel, match=r"enable_lora is true, and the attention of .* takes no adapters"):
        with_lora_targets(decoder, max_loras=1, max_rank=8)


@pytest.mark.slow
@pytest.mark.parametrize("family", FUSED)
def test_logits_are_pefts(family: str, plain_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = pytest.importorskip("peft")
        torch.manual_seed(7)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=list(FUSED[family]), init_lora_weights=False
        )
        base = AutoModelForCausalLM.from_pretrained(plain_checkpoint(family), dtype=torch.float32)
        model = peft.get_peft_model(base, config).eval()
        model.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits_with(plain_checkpoint(family), tmp_path), oracle_logits(model), atol=ATOL, rtol=ATOL
    )
