"""Granite 3, the dense models."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Granite(ModelFamily):
    """Llama with multipliers of embeddings, scores, residual additions and logits."""

    model_type = "granite"
    own_fields = words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Granite:
        bias = config.boolean("attention_bias", False)
        return cls(
            (None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.boolean("mlp_bias", False),
            attention_scale=config.number("attention_multiplier", 1.0),
            embedding_multiplier=config.number("embedding_multiplier", 1.0),
            residual_multiplier=config.number("residual_multiplier", 1.0),
            logits_scaling=config.number("logits_scaling", 1.0),
        )
