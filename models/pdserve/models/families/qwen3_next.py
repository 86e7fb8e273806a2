"""Qwen3-Next: gated delta nets in three of four layers, attention with gates in the others, and experts."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.delta_shape import DELTA_FIELDS, DeltaShape
from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.state_shape import StateShape
from pdserve.models.families.qwen2_moe import Qwen2Moe
from pdserve.models.families.qwen3_moe import read_sparse_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention
from pdserve.models.layers.gated_delta_net import GatedDeltaNet
from pdserve.models.weights.weight_loader import WeightLoader

_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Qwen2Moe):
    """A layer with a delta net keeps its state per sequence, and no keys."""

    model_type = "qwen3_next"
    own_fields = (
        EXPERT_FIELDS
        | DELTA_FIELDS
        | words(
            "moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers shared_expert_intermediate_size "
            "layer_types full_attention_interval"
        )
    )
    default_num_kv_heads = 2
    default_head_dim = 256
    default_rotary_factor = 0.25
    rotates_part = True
    norm_offset = 1.0
    qk_norm = True
    gates_attention = True

    delta: DeltaShape

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen3Next:
        num_experts, top_k = read_experts(config, default_experts=512, default_top_k=10)
        bias = config.boolean("attention_bias", False)
        delta = DeltaShape.read(config)
        is_state = cls._state_layers(config, num_layers)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            states=StateShape(is_state, delta.num_key_heads, delta.state_size) if any(is_state) else None,
            num_experts=num_experts,
            top_k=top_k,
            expert_size=config.integer("moe_intermediate_size", 512, maximum=MAX_EXPERT_SIZE),
            normalise=config.boolean("norm_topk_prob", True),
            sparse_layers=read_sparse_layers(config, num_layers, num_experts),
            shared_size=config.integer("shared_expert_intermediate_size", 512, maximum=MAX_EXPERT_SIZE),
            delta=delta,
        )

    @staticmethod
    def _state_layers(config: JsonObject, num_layers: int) -> tuple[bool, ...]:
        kinds = config.items("layer_types")
        if kinds is None:
            interval = config.integer("full_attention_interval", 4)
            return tuple((layer + 1) % interval > 0 for layer in range(num_layers))
        if len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
            raise config.error("layer_types", f"{num_layers} times linear_attention or full_attention")
        return tuple(kind == "linear_attention" for kind in kinds)

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Layers that draft have names of their own."""
        return weight.startswith("mtp.")

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        if not config.has_state(index):
            return super().load_attention(weights, prefix, config, index)
        return GatedDeltaNet.load(
            weights, prefix.replace(".self_attn", ".linear_attn"), config.kv_cache_place(index)[1], config.state_spec(index),
            self.delta, config.hidden_size, config.rms_norm_eps,
        )  # fmt: skip
