"""Llama 1 to 3."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Llama(ModelFamily):
    """No windows; biases if config.json has `attention_bias`, for all four projections, or `mlp_bias`."""

    model_type = "llama"

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Llama:
        bias = config.boolean("attention_bias", False)
        mlp_bias = config.boolean("mlp_bias", False)
        return cls((None,) * num_layers, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
