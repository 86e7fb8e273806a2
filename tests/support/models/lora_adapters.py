"""PEFT folders with random weights, written without PEFT, and checkpoints into which an adapter is merged, for oracles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL_LINEARS,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.1,
    has_vision: bool = False,
    **fields: Any,
) -> Path:
    """Write an adapter for the checkpoint in `base` and return its folder; the same arguments give the same bytes.

    spread: standard deviation of all weights, large enough to change texts. has_vision: True: also for modules of a vision
    encoder. fields: of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": list(targets),
        "bias": "none", "lora_dropout": 0.05, "inference_mode": True, "base_model_name_or_path": "base",
    } | fields  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(_weights(base).items()):
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in targets and (has_vision or "visual." not in module):
            out_size, in_size = weight.shape
            for side, shape in (("A", (rank, in_size)), ("B", (out_size, rank))):
                drawn = torch.empty(shape).normal_(0.0, spread, generator=generator)
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = drawn.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def adapter_flags(folder: Path, base: Path, *names: str) -> list[str]:
    """Write an adapter of each name; returns flags of a worker with two slots that offers them."""
    flags = ["--enable-lora", "--max-loras=2", "--max-lora-rank=8"]
    for seed, name in enumerate(names, 1):
        flags += ["--lora-modules", f"{name}={make_adapter(folder / name, base, seed=seed, spread=0.3)}"]
    return flags


def merged_checkpoint(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the base model with `W + scale * B A` in place of each `W`, and return its folder."""
    shutil.copytree(base, folder)
    config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    weights, tensors = _weights(base), load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += scale * b.float() @ a.float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")
