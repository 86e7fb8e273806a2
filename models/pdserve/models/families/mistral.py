"""Mistral."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, window_of_all_layers
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Mistral(ModelFamily):
    """The same window in all layers, no biases."""

    model_type = "mistral"
    own_fields = WINDOW_FIELDS
    default_num_kv_heads = 8

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Mistral:
        return cls(window_of_all_layers(config, num_layers))
