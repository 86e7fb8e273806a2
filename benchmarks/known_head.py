"""Models of 100 million parameters with an MTP head that is right as often as it is told to be (`speculation.py --head`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_LAYERS = 12
_COMMON: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "max_position_embeddings": 2048, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False, "num_hidden_layers": NUM_LAYERS + 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_attention_heads": 12, "num_key_value_heads": 12, "q_lora_rank": 384, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": NUM_LAYERS + 1,
    },
    "qwen3_next": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "mlp_only_layers": list(range(NUM_LAYERS + 1)),
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3 + ["full_attention"],
    },
}  # fmt: skip
"""`model_type` -> fields of config.json next to `_COMMON`, with a layer more: the head's."""
_HEADS = {
    "deepseek_v3": (f"model.layers.{NUM_LAYERS}", "", ("enorm", "hnorm", "shared_head.norm"), "eh_proj", 1.0),
    "qwen3_next": ("mtp", ".layers.0", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc", 0.0),
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

    import pdserve.models.demo

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**_COMMON, **FAMILIES[family]), dtype=torch.bfloat16
    )
    hidden, vocab = _COMMON["hidden_size"], _COMMON["vocab_size"]
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
    [demo] = pdserve.models.demo.__path__
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo) / name, folder / name)
