"""Gemma 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import LayerNorms, ModelFamily
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Gemma2(ModelFamily):
    """Norms before and after attention and MLP, with weights around 0; GELU; soft caps of scores and logits; windows in every
    second layer; embeddings times the root of their size."""

    model_type = "gemma2"
    own_fields = words(
        "query_pre_attn_scalar sliding_window layer_types final_logit_softcapping attn_logit_softcapping hidden_activation"
    )
    default_num_kv_heads = 4
    default_head_dim = 256
    default_tie_word_embeddings = True
    activation_field = "hidden_activation"
    activations = ("gelu_pytorch_tanh",)
    norm_offset = 1.0
    norms = LayerNorms(
        input="input_layernorm",
        attention_post="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    )

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Gemma2:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
        bias = config.boolean("attention_bias", False)
        return cls(
            windows_of_types(config, kinds),
            qkv_bias=bias,
            output_bias=bias,
            attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
            embedding_multiplier=math.sqrt(config.integer("hidden_size")),
            logits_softcap=_softcap(config, "final_logit_softcapping", 30.0),
        )

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Rounded to the dtype of the weights, as in transformers."""
        return float(torch.tensor(self.embedding_multiplier, dtype=dtype))


def _softcap(config: JsonObject, name: str, default: float) -> float | None:
    return None if config.is_null(name) else config.number(name, default)
