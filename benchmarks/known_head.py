"""Models of 100 million parameters with an MTP head that is right as often as it is told to be (`speculation.py --head`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import torch
from torch import Tensor

NUM_LAYERS = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": NUM_LAYERS + 1},
    "qwen3_5_text": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3 + ["full_attention"]},
}
"""Families of `families.py` -> fields that differ, since they have a layer more: the head's."""
_HEADS = {
    "deepseek_v3": (f"model.layers.{NUM_LAYERS}", "", ("enorm", "hnorm", "shared_head.norm"), "eh_proj", 1.0),
    "qwen3_5_text": ("mtp", ".layers.0", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc", 0.0),
}
"""Names: of the head, of its layer in it, of its norms, of its projection; what a norm's weight is that changes nothing."""
_ADDED_TO_STREAM = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def write_model_with_head(folder: Path, family: str, noise: float) -> None:
    """Write a checkpoint in bfloat16 whose layers add nothing to the residual stream, and a tokenizer.

    The token after t is that whose row of the output matrix is the embedding of t. The head sees the last token's embedding, and
    noise times a random product of the hidden state before it, which makes it as often wrong as noise is large.
    """
    from safetensors.torch import load_file, save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = families.COMMON | families.FAMILIES[family] | FAMILIES[family] | {"num_hidden_layers": NUM_LAYERS + 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields), dtype=torch.bfloat16)
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(_ADDED_TO_STREAM):
                weight.zero_()
        embeddings = torch.randn(vocab, hidden).bfloat16()
        model.get_input_embeddings().weight.copy_(embeddings)
        model.get_output_embeddings().weight[torch.randperm(vocab)] = embeddings
    model.save_pretrained(folder)
    [file] = folder.glob("*.safetensors")
    head, layer, norms, projection, identity = _HEADS[family]
    own = f"model.layers.{NUM_LAYERS}."
    weights: dict[str, Tensor] = {
        f"{head}{layer}.{name.removeprefix(own)}" if name.startswith(own) else name: weight
        for name, weight in load_file(file).items()
    }
    weights |= {f"{head}.{name}.weight": torch.full((hidden,), identity).bfloat16() for name in norms}
    mixed = torch.randn(hidden, hidden) / hidden**0.5
    weights[f"{head}.{projection}.weight"] = torch.cat((torch.eye(hidden), noise * mixed), dim=1).bfloat16()
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    families.write_tokenizer(folder)
