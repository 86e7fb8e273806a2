"""Qwen3, the dense models."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, windows_by_layer_type
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.gated_mlp import GatedMlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True)
class Qwen3(ModelFamily):
    """Queries and keys are normalised per head; windows in some layers; biases if config.json has `attention_bias`."""

    model_type = "qwen3"
    own_fields = WINDOW_FIELDS | {"layer_types"}
    default_num_kv_heads = 32
    default_head_dim = 128

    attention_bias: bool
    """True: all four projections have biases."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen3:
        return cls(windows_by_layer_type(config, num_layers), config.boolean("attention_bias", False))

    def load_layer(self, weights: WeightLoader, config: ModelConfig, index: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        attention = SelfAttention.load(
            weights, f"{prefix}.self_attn", index, config.attention_spec(index), hidden,
            qkv_bias=self.attention_bias, output_bias=self.attention_bias, qk_norm_eps=config.rms_norm_eps,
        )  # fmt: skip
        mlp = GatedMlp.load(weights, f"{prefix}.mlp", hidden, config.intermediate_size, bias=False)
        return DecoderLayer.load(weights, prefix, hidden, config.rms_norm_eps, attention, mlp)
