"""Mistral."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, window_of_all_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.gated_mlp import GatedMlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True)
class Mistral(ModelFamily):
    """The same window in all layers, no biases."""

    model_type = "mistral"
    own_fields = WINDOW_FIELDS
    default_num_kv_heads = 8

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Mistral:
        return cls(window_of_all_layers(config, num_layers))

    def load_layer(self, weights: WeightLoader, config: ModelConfig, index: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        attention = SelfAttention.load(
            weights, f"{prefix}.self_attn", index, config.attention_spec(index), hidden,
            qkv_bias=False, output_bias=False,
        )  # fmt: skip
        mlp = GatedMlp.load(weights, f"{prefix}.mlp", hidden, config.intermediate_size, bias=False)
        return DecoderLayer.load(weights, prefix, hidden, config.rms_norm_eps, attention, mlp)
