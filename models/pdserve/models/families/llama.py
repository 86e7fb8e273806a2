"""Llama 1 to 3."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.gated_mlp import GatedMlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True)
class Llama(ModelFamily):
    """No windows; biases if config.json has `attention_bias` or `mlp_bias`."""

    model_type = "llama"

    attention_bias: bool
    """True: all four projections have biases."""
    mlp_bias: bool

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Llama:
        return cls(
            sliding_windows=(None,) * num_layers,
            attention_bias=config.boolean("attention_bias", False),
            mlp_bias=config.boolean("mlp_bias", False),
        )

    def load_layer(self, weights: WeightLoader, config: ModelConfig, index: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        attention = SelfAttention.load(
            weights, f"{prefix}.self_attn", index, config.attention_spec(index), hidden,
            qkv_bias=self.attention_bias, output_bias=self.attention_bias,
        )  # fmt: skip
        mlp = GatedMlp.load(weights, f"{prefix}.mlp", hidden, config.intermediate_size, bias=self.mlp_bias)
        return DecoderLayer.load(weights, prefix, hidden, config.rms_norm_eps, attention, mlp)
