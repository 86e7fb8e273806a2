"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, windows_by_layer_type
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Qwen2(ModelFamily):
    """Windows in some layers; queries, keys and values always have biases, the output projection never."""

    model_type = "qwen2"
    own_fields = WINDOW_FIELDS | {"layer_types"}
    default_num_kv_heads = 32

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen2:
        return cls(windows_by_layer_type(config, num_layers), qkv_bias=True)
