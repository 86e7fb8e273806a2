"""Tiny random Hugging Face checkpoints of every supported architecture, made with `transformers`, the oracle."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

with warnings.catch_warnings():
    # Whoever imports this first must not fail for a warning that some library gives while it is imported.
    warnings.simplefilter("ignore")
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

VOCAB_SIZE = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = """
The miller's daughter walked to the river every morning, and every morning the river had another colour.
"Where does the water go?" she asked. "To the sea," said the miller, "and the sea gives it back as rain."
She counted the boats: one, two, three, ten, twelve. On some days there were none at all; then she sang.
In winter the wheel stood still, the house was quiet, and the questions were longer than the evenings.
"""


def make_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    dtype: str = "float32",
    max_position_embeddings: int = 4096,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write model and tokenizer into `folder` and return it; the same arguments give the same bytes.

    `overrides` are fields of the architecture's `transformers` configuration.
    """
    make_config, make_model = ARCHITECTURES[architecture]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "dtype": dtype,
    }
    if architecture == "mistral":
        fields["sliding_window"] = None
    if architecture == "qwen3_moe":
        fields |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
    fields.update(overrides)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make_model(make_config(**fields))
        for name, weight in model.named_parameters():
            # Norms start as ones and biases as zeros, which would hide that they were dropped or swapped.
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return folder


def make_other_family(
    folder: Path,
    model_type: str,
    *,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    kind: Any = AutoModelForCausalLM,
    whole: tuple[str, Mapping[str, Any]] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """Write a random checkpoint of any causal language model in `transformers` into `folder`, and return the model.

    There is no tokenizer with it. kind: one of transformers' auto classes. whole: (type, other fields) of a model whose language
    model it is; None: it has no other part. `overrides` are fields of its configuration.
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
    }  # fmt: skip
    config = CONFIG_MAPPING[model_type](**(fields | overrides))
    if whole is not None:
        config = CONFIG_MAPPING[whole[0]](
            text_config=config, tie_word_embeddings=config.tie_word_embeddings, **deepcopy(dict(whole[1]))
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = kind.from_config(config)
        if any(hasattr(config.get_text_config(), name) for name in ("num_experts_per_tok", "top_k_experts")):
            # the default takes only sizes that are multiples of 8
            model.set_experts_implementation("eager")
        for name, weight in model.named_parameters():
            if re.search(r"norm(\.\d+)?\.weight$", name):
                # around the value with which it changes nothing
                centre = float(weight.flatten()[0])
                weight.uniform_(centre - 0.5, centre + 0.5)
            elif name.endswith(("bias", "sinks")):
                weight.normal_(std=0.5)
            elif name.endswith(("router.scale", "per_expert_scale")):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                # with transformers' first values a state forgets each token at once, and a wrong one changes nothing
                weight.uniform_(-4.0, -1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_complex():
                    # positions of an encoder that no text reaches, which have no real dtype
                    setattr(module, name, buffer.real.clone())
    model.to(dtype).eval().save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `...` removes one."""
    values = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            values.pop(name, None)
        else:
            values[name] = value
    path.write_text(json.dumps(values))


@cache
def tiny_tokenizer() -> str:
    """The tokenizer of all checkpoints, as the text of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    return str(tokenizer.to_str())


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer of all these checkpoints into `folder`."""
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_tokenizer()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def make_classifier(folder: Path, model_type: str = "llama", *, num_labels: int = 3, **fields: Any) -> PreTrainedModel:
    """Write a random checkpoint with a classification head, and its tokenizer, into `folder`, and return the model."""
    model = make_other_family(
        folder, model_type, kind=AutoModelForSequenceClassification, num_labels=num_labels, **fields
    )
    save_tokenizer(folder)
    return model
