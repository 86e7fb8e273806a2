"""Gemma 3, the text models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.models.config.family_fields import words
from pdserve.models.config.rope_of_layer_type import rope_of_layer_type
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.families.gemma2 import Gemma2
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Gemma3(Gemma2):
    """Gemma 2 with norms of queries and keys, windows in five of six layers, which have a rotary base of their own, and without
    a soft cap of scores."""

    model_type = "gemma3_text"
    own_fields = words(
        "query_pre_attn_scalar sliding_window sliding_window_pattern layer_types final_logit_softcapping hidden_activation "
        "rope_local_base_freq"
    )
    default_rope_theta = 1e6
    qk_norm = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Gemma3:
        pattern = config.integer("sliding_window_pattern", 6)
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
        bias = config.boolean("attention_bias", False)
        return cls(
            windows_of_types(config, kinds),
            qkv_bias=bias,
            output_bias=bias,
            attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            embedding_multiplier=math.sqrt(config.integer("hidden_size")),
            logits_softcap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
        )

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        theta = config.number("rope_theta", cls.default_rope_theta)
        return rope_of_layer_type(config, "full_attention", head_dim, max_positions, theta)

    @classmethod
    def read_local_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        theta = config.number("rope_local_base_freq", 10000.0)
        return rope_of_layer_type(config, "sliding_attention", head_dim, max_positions, theta)
