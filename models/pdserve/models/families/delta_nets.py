"""What Qwen3-Next and Qwen3.5 have in common: gated delta nets in most layers, and attention with gates in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pdserve.models.config.delta_shape import DELTA_FIELDS, DeltaShape
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.state_shape import StateShape, state_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention
from pdserve.models.layers.draft_head import DraftNames
from pdserve.models.layers.gated_delta_net import GatedDeltaNet
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class DeltaNets(ModelFamily):
    """A layer with a delta net keeps its state per sequence, and no keys."""

    delta_fields: ClassVar[frozenset[str]] = DELTA_FIELDS | words(
        "layer_types full_attention_interval mtp_num_hidden_layers mtp_use_dedicated_embeddings"
    )
    default_head_dim = 256
    default_rotary_factor = 0.25
    rotates_part = True
    norm_offset = 1.0
    qk_norm = True
    gates_attention = True
    draft_names = DraftNames(
        "mtp", "layers.0", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", passes_normed=True
    )
    splits_inputs: ClassVar[bool] = False
    """See `is_split` of `GatedDeltaNet.load`."""

    delta: DeltaShape

    @classmethod
    def read_layers(cls, config: JsonObject, num_layers: int) -> dict[str, Any]:
        """Options of the layers' attention. Raises: ConfigError."""
        bias, delta = config.boolean("attention_bias", False), DeltaShape.read(config)
        is_state = state_layers(config, num_layers, ("linear_attention",), ("full_attention",))
        if is_state is None:
            interval = config.integer("full_attention_interval", 4)
            is_state = tuple((layer + 1) % interval > 0 for layer in range(num_layers))
        states = StateShape.of(is_state, delta.num_key_heads, delta.state_size)
        return {
            "sliding_windows": (None,) * num_layers, "qkv_bias": bias, "output_bias": bias, "states": states, "delta": delta,
        }  # fmt: skip

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return super().inner_sizes(intermediate_size) | {"linear_num_key_heads": self.delta.num_key_heads}

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Layers that draft have names of their own."""
        return weight.startswith("mtp.")

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        if not config.has_state(index):
            return super().load_attention(weights, prefix, config, index)
        return GatedDeltaNet.load(
            weights, prefix.replace(".self_attn", ".linear_attn"), config.kv_cache_place(index)[1], config.state_spec(index),
            self.delta, config.hidden_size, config.rms_norm_eps, is_split=self.splits_inputs,
        )  # fmt: skip
