"""Qwen3, the dense models."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, windows_by_layer_type
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Qwen3(ModelFamily):
    """Queries and keys are normalised per head; windows in some layers; all four projections have biases if config.json
    has `attention_bias`."""

    model_type = "qwen3"
    own_fields = WINDOW_FIELDS | {"layer_types"}
    default_num_kv_heads = 32
    default_head_dim = 128
    qk_norm = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen3:
        bias = config.boolean("attention_bias", False)
        return cls(windows_by_layer_type(config, num_layers), qkv_bias=bias, output_bias=bias)
