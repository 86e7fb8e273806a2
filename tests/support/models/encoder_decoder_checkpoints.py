"""Tiny random checkpoints of models with an encoder, made with their classes in `transformers`, and answers by `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.support.models.checkpoints import VOCAB_SIZE, save_tokenizer

START, EOS, PAD = 1, 2, 0
FORCED = 7
"""First output token of `bart_scaled`, which is not part of an answer."""
_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 56, "max_position_embeddings": 96, "init_std": 0.05,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "n_positions": 96,
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20, "initializer_factor": 3.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", _BART),
    "bart_scaled": ("bart", _BART | {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("mbart", _BART | {"scale_embedding": True}),
    "t5": ("t5", _T5),
    "flan_t5": ("t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "is_gated_act": True}),
}
"""Name -> `model_type`, fields of its configuration."""


def make_encoder_decoder(
    folder: Path, name: str = "bart", *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> PreTrainedModel:
    """Write model and tokenizer into `folder`; returns the model in float32."""
    model_type, fields = FAMILIES[name]
    given: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": EOS}
    given |= {"decoder_start_token_id": START, "dtype": "float32"}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[model_type](**given | fields | overrides)).eval()
        for name_of_weight, weight in model.named_parameters():
            if "norm" in name_of_weight and name_of_weight.endswith("weight"):
                weight.uniform_(*((-1.5, 1.5) if "bart" in model_type else (0.5, 1.5)))
            elif name_of_weight.endswith("bias"):
                weight.normal_(std=0.1)
            elif "embed_positions" in name_of_weight:
                weight.normal_()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    if name == "bart_scaled":
        model.generation_config.forced_bos_token_id = FORCED
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return model


class GreedyAnswers:
    """Greedy answers of `transformers`, one prompt at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Output tokens, with EOS if it is among them."""
        forced = getattr(self._model.generation_config, "forced_bos_token_id", None)
        num_forced = 0 if forced is None else 1
        ids: list[int] = self._model.generate(
            torch.tensor([list(prompt)]),
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_tokens + num_forced,
            forced_eos_token_id=None,
        )[0].tolist()
        return ids[1 + num_forced :]

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], decoder_ids: Sequence[int]) -> torch.Tensor:
        """`[len(decoder_ids), V]`"""
        output = self._model(
            input_ids=torch.tensor([list(prompt)]), decoder_input_ids=torch.tensor([list(decoder_ids)])
        )
        logits: torch.Tensor = output.logits[0]
        return logits
