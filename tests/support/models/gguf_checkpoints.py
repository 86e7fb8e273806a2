"""GGUF files of the models that a folder has, written with the package `gguf` and its table of names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

PERMUTED = ("llama", "granite", "smollm3")
"""Architectures whose queries and keys llama.cpp's converter stores in another order."""
_ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
F32 = gguf.GGMLQuantizationType.F32


def folder_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


def byte_pair_metadata(tokenizer_json: str, pre: str = "gpt-2") -> dict[str, Any]:
    """Keys of a tokenizer of byte pairs, without `tokenizer.ggml.` in front."""
    parsed = json.loads(tokenizer_json)
    special = {token["id"] for token in parsed["added_tokens"] if token["special"]}
    plain = {token["id"] for token in parsed["added_tokens"] if not token["special"]}
    vocab = parsed["model"]["vocab"] | {token["content"]: token["id"] for token in parsed["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if index in special else 4 if index in plain else 1 for index in range(len(tokens))],
        "merges": [" ".join(merge) for merge in parsed["model"]["merges"]],
    }


def made_up_tokens(count: int) -> dict[str, Any]:
    """A vocabulary for tests that read no text."""
    tokens = ["a", "b", "ab", *(f"t{index}" for index in range(3, count))]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b"]}


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    tokenizer: Mapping[str, Any] | None = None,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    split_max_tensors: int = 0,
    name: str = "random",
    **keys: Any,
) -> Path:
    """Write a folder's model. kind: type of matrices. keys: of the architecture, with `__` for a dot, added or changed;
    None: left out. Returns the path of the first file."""
    config = json.loads((folder / "config.json").read_text())
    weights = folder_weights(folder)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    writer.add_type("model")
    writer.add_name(name)
    for key, value in (
        _keys(config, architecture) | {key.replace("__", "."): value for key, value in keys.items()}
    ).items():
        if value is not None:
            add_key(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or made_up_tokens(config["vocab_size"])).items():
        add_key(writer, key if "." in key or key == "chat_template" else f"tokenizer.ggml.{key}", value)
    for stored, numbers in _tensors(weights, config, architecture).items():
        type_ = kind if numbers.ndim > 1 and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else F32
        writer.add_tensor(stored, gguf.quantize(numbers, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split_max_tensors else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def _keys(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta", 10000.0))
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // heads,
        "attention.value_length": config.get("head_dim") or config["hidden_size"] // heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(theta),
        "vocab_size": config["vocab_size"],
    }
    if "num_experts_per_tok" in config:
        keys["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        keys["expert_used_count"] = config["num_experts_per_tok"]
    if "moe_intermediate_size" in config:
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    for key, field in (
        ("attention.sliding_window", "sliding_window"), ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"), ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"), ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ):  # fmt: skip
        if config.get(field) is not None:
            keys[key] = config[field] if field == "sliding_window" else float(config[field])
    return keys


def _tensors(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], architecture: str
) -> dict[str, NDArray[np.float32]]:
    """The converter's names and numbers."""
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config["num_hidden_layers"])
    found: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, weight in weights.items():
        numbers = weight.float().numpy()
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, part = after.partition(".")
            merged = f"{before}.experts.{part}".replace("model.layers", "layers").replace(
                "block_sparse_moe", "feed_forward"
            )
            experts.setdefault(merged if "feed_forward" in merged else f"{before}.experts.{part}", {})[int(number)] = (
                numbers
            )
            continue
        if architecture in PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + 1
        found[_stored(names, name)] = numbers
    for name, pieces in experts.items():
        found[_stored(names, name)] = np.stack([pieces[number] for number in range(len(pieces))])
    return found


def _stored(names: Any, name: str) -> str:
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return str(stored)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, Sequence)
        writer.add_array(key, value)
