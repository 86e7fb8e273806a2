"""Ways in which a checkpoint of any family may be broken, and what the one sentence that refuses it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.checkpoints import edit_json

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NEEDED_BY_ALL = ("vocab_size", "hidden_size", "num_hidden_layers")
"""Fields of config.json that every family needs."""
NEEDED = (*NEEDED_BY_ALL, "intermediate_size", "num_attention_heads", "max_position_embeddings")
"""The same of families with attention."""


def split_in_two(folder: Path) -> None:
    """Make two shards and an index of `model.safetensors`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file({name: weights[name] for name in half}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def stored_names(folder: Path) -> Mapping[str, str]:
    """Name of each weight -> its shard."""
    found: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def change_weight(folder: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Change one weight of a sharded checkpoint, or remove it without a trace."""
    weight_map = dict(stored_names(folder))
    path = folder / weight_map[name]
    weights = load_file(path)
    if change is None:
        del weights[name], weight_map[name]
        edit_json(folder / INDEX, weight_map=weight_map)
    else:
        weights[name] = change(weights[name]).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def tail_of(name: str) -> str:
    """The part of a weight's name that is the same whatever it is stored under."""
    return name.removeprefix("model.").removeprefix("language_model.")


def edit_text_config(folder: Path, **changes: object) -> None:
    """As `edit_json` of config.json, or of the language model's part in it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "text_config" not in config:
        edit_json(path, **changes)
        return
    part = folder / "text_config.json"
    part.write_text(json.dumps(config["text_config"]))
    edit_json(part, **changes)
    edit_json(path, text_config=json.loads(part.read_text()))
    part.unlink()


def _matrix(folder: Path) -> str:
    """A matrix of the second layer."""
    found: str = max(
        name for name in stored_names(folder)
        if re.search(r"layers\.1\.(mlp|self_attn|feed_forward|linear_attn|mamba|mixer)\.", name) and "norm" not in name
        and not name.endswith(("bias", "sinks")) and ".visual." not in name
    )  # fmt: skip
    return found


def _missing_weight(folder: Path) -> str:
    name = _matrix(folder)
    change_weight(folder, name, None)
    return rf"weight \S*{re.escape(tail_of(name))} is in none of {SHARDS[0]}, {SHARDS[1]}"


def _wrong_shape(folder: Path) -> str:
    name = _matrix(folder)
    change_weight(folder, name, lambda weight: weight[..., :-1])
    return rf"{re.escape(tail_of(name))} has shape \[[\d, ]+\], config\.json says \[[\d, ]+\]"


def _unknown_dtype(folder: Path) -> str:
    name = _matrix(folder)
    change_weight(folder, name, torch.Tensor.double)
    return rf"{re.escape(tail_of(name))} has dtype F64; read are F32, BF16, F16"


def _truncated_shard(folder: Path) -> str:
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-100])
    return f"{SHARDS[1]} is truncated or no safetensors file"


def _missing_shard(folder: Path) -> str:
    (folder / SHARDS[1]).unlink()
    return f"{SHARDS[1]} does not exist or is no regular file; {INDEX} names it"


def _larger_vocabulary(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    edit_text_config(folder, vocab_size=vocab_size + 8)
    return rf"has shape \[{vocab_size}, \d+\], config\.json says \[{vocab_size + 8}, \d+\]"


BREAKAGES: Mapping[str, Callable[[Path], str]] = {
    "missing weight": _missing_weight,
    "wrong shape": _wrong_shape,
    "unknown dtype": _unknown_dtype,
    "truncated shard": _truncated_shard,
    "missing shard": _missing_shard,
    "larger vocabulary": _larger_vocabulary,
}
"""Breaks a folder that `split_in_two` made, and returns the pattern of the message."""
