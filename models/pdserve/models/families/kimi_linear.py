"""Kimi Linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pdserve.models.config.delta_shape import KIMI_FIELDS, KIMI_LAYERS, DeltaShape
from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.config.family_fields import words
from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.state_shape import StateShape, state_layers
from pdserve.models.families.grouped_mixture import MIXTURE_FIELDS, GroupedMixture
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, FeedForward
from pdserve.models.layers.gated_delta_net import GatedDeltaNet
from pdserve.models.weights.weight_loader import WeightLoader

_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class KimiLinear(GroupedMixture):
    """Kimi's delta attention in most layers, which keep a state per sequence; in the others latent attention without rotation."""

    model_type = "kimi_linear"
    field_names: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
        "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
    }  # fmt: skip
    own_fields = (
        LATENT_FIELDS
        | MIXTURE_FIELDS
        | KIMI_FIELDS
        | words("layer_types mlp_layer_types mla_use_nope moe_router_activation_func use_grouped_topk")
        | frozenset(field_names.values())
    )
    routing: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "moe_router_activation_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    }  # fmt: skip
    default_rms_norm_eps = 1e-5
    default_latent = LatentShape(0, 512, 128, 64, 128, rotates_neighbours=True)
    draft_names = None
    default_experts = ExpertShape(256, 8, 1024, scale=2.446)
    expert_projections = ("w1", "w3", "w2")

    delta: DeltaShape

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> KimiLinear:
        for name in ("mla_use_nope", "use_grouped_topk"):
            if not config.boolean(name, True):
                raise config.error(name, "true")
        delta, has_bias = DeltaShape.read_kimi(config), config.boolean("attention_bias", False)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            unrotated_layers=frozenset(range(num_layers)),
            latent=cls.default_latent.read(config),
            states=StateShape.of(_state_layers(config, num_layers), delta.num_key_heads, delta.state_size),
            delta=delta,
            experts=cls.read_experts(config),
            sparse_layers=cls.read_sparse_layers(config, num_layers),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return super().inner_sizes(intermediate_size) | {"linear_num_heads": self.delta.num_key_heads}

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        if not config.has_state(index):
            return super().load_attention(weights, prefix, config, index)
        return GatedDeltaNet.load_kimi(
            weights, prefix, config.kv_cache_place(index)[1], config.state_spec(index), self.delta, config.hidden_size,
            config.rms_norm_eps,
        )  # fmt: skip

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        """Published layers without experts have an `mlp`; transformers writes the name of the others there, too."""
        other = prefix.replace(".mlp", ".block_sparse_moe")
        has_other = self.sparse_layers[index] or weights.shape(f"{other}.up_proj.weight") is not None
        return super().load_mlp(weights, other if has_other else prefix, config, index)


def _state_layers(config: JsonObject, num_layers: int) -> tuple[bool, ...]:
    """Per layer, True for a state. Raises: ConfigError."""
    named = state_layers(config, num_layers, ("linear_attention",), ("full_attention",))
    if named is not None:
        return named
    inner = config.child("linear_attn_config")
    if inner is None or not all(inner.has(field) for field in KIMI_LAYERS):
        return tuple(layer == 0 or layer % _INTERVAL > 0 for layer in range(num_layers))
    states, attention = (inner.items(field) or [] for field in KIMI_LAYERS)
    listed = [number for number in (*states, *attention) if type(number) is int]
    if sorted(listed) != list(range(1, num_layers + 1)) or len(listed) < len(states) + len(attention):
        raise inner.error(KIMI_LAYERS[0], f"with {KIMI_LAYERS[1]} each number from 1 to {num_layers} once")
    return tuple(number in states for number in range(1, num_layers + 1))
