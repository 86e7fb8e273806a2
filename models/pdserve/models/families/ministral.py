"""Ministral."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Ministral(ModelFamily):
    """Mistral with windows in the layers that `layer_types` names; without the list in all."""

    model_type = "ministral"
    own_fields = frozenset({"sliding_window", "layer_types"})
    default_num_kv_heads = 8

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Ministral:
        kind = "full_attention" if config.is_null("sliding_window") else "sliding_attention"
        return cls(windows_of_types(config, [kind] * num_layers))
