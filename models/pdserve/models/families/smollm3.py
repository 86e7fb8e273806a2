"""SmolLM3."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, windows_by_layer_type
from pdserve.models.config.unrotated_layers import read_unrotated_layers
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class SmolLM3(ModelFamily):
    """Llama with layers without rotary positions, which may have windows."""

    model_type = "smollm3"
    own_fields = WINDOW_FIELDS | words("no_rope_layers no_rope_layer_interval layer_types")
    default_num_kv_heads = 4
    default_rope_theta = 2e6
    default_tie_word_embeddings = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> SmolLM3:
        bias = config.boolean("attention_bias", False)
        unrotated = read_unrotated_layers(config, num_layers)
        kinds = ["sliding_attention" if layer in unrotated else "full_attention" for layer in range(num_layers)]
        return cls(
            windows_by_layer_type(config, num_layers, default_types=kinds, default_window=None),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.boolean("mlp_bias", False),
            unrotated_layers=unrotated,
        )
