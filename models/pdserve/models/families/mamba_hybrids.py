"""Mamba 2 layers next to layers with attention: Granite 4 and Bamba."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE
from pdserve.models.config.family_fields import words
from pdserve.models.config.mamba2_shape import GRANITE_FIELDS, Mamba2Shape, MambaFields
from pdserve.models.config.model_config import LayerNorms, ModelConfig, ModelFamily
from pdserve.models.config.state_shape import StateShape, layers_without, state_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, FeedForward
from pdserve.models.layers.mamba2 import Mamba2
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.stacked_experts import load_stacked_experts
from pdserve.models.weights.weight_loader import WeightLoader

_STATES, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")
_POSITIONS = ("rope", "nope")


@dataclass(frozen=True, kw_only=True)
class MambaHybrid(ModelFamily):
    """A layer with Mamba 2 keeps its state per sequence, and no keys."""

    mamba: Mamba2Shape

    mamba_fields: ClassVar[MambaFields] = GRANITE_FIELDS
    default_mamba: ClassVar[Mamba2Shape] = Mamba2Shape(state_size=256, num_groups=1)

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        name = self.mamba_fields.num_heads
        return super().inner_sizes(intermediate_size) | self.mamba.shared_sizes(name)

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        if not config.has_state(index):
            return super().load_attention(weights, prefix, config, index)
        return Mamba2.load(
            weights, prefix.replace(".self_attn", ".mamba"), config.kv_cache_place(index)[1], config.state_spec(index),
            self.mamba, config.hidden_size, config.rms_norm_eps,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraniteHybrid(MambaHybrid):
    """Granite's multipliers; each layer has an MLP, and may have experts next to it."""

    model_type = "granitemoehybrid"
    own_fields = (
        GRANITE_FIELDS.names
        | EXPERT_FIELDS
        | words(
            "embedding_multiplier attention_multiplier residual_multiplier logits_scaling shared_intermediate_size "
            "position_embedding_type layer_types layers_block_type"
        )
    )

    num_experts: int
    """0: there are MLPs only."""
    top_k: int
    mlp_size: int

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> GraniteHybrid:
        bias, mamba = config.boolean("attention_bias", False), cls.default_mamba.read(config, cls.mamba_fields)
        num_experts, top_k = read_experts(config, default_experts=8, default_top_k=2)
        positions = config.get("position_embedding_type") or _POSITIONS[1]
        if positions not in _POSITIONS:
            raise config.error("position_embedding_type", " or ".join(f'"{name}"' for name in _POSITIONS))
        is_state = (
            state_layers(config, num_layers, _STATES, _ATTENTION)
            or state_layers(config, num_layers, _STATES, _ATTENTION, "layers_block_type")
            or (True,) * num_layers
        )
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            attention_scale=config.number("attention_multiplier", 1.0),
            embedding_multiplier=config.number("embedding_multiplier", 1.0),
            residual_multiplier=config.number("residual_multiplier", 1.0),
            logits_scaling=config.number("logits_scaling", 1.0),
            unrotated_layers=frozenset() if positions == "rope" else frozenset(range(num_layers)),
            states=StateShape.of(is_state, mamba.num_runs, mamba.run_size),
            mamba=mamba,
            num_experts=num_experts,
            top_k=top_k,
            mlp_size=config.integer("shared_intermediate_size", 1024, maximum=MAX_EXPERT_SIZE),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = super().inner_sizes(intermediate_size) | {"shared_intermediate_size": self.mlp_size}
        return (
            sizes if self.num_experts else {name: size for name, size in sizes.items() if name != "intermediate_size"}
        )

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        names = ("input_linear", "output_linear")
        shared = Mlp.load(
            weights, prefix.replace(".mlp", ".shared_mlp"), config.hidden_size, self.mlp_size,
            bias=False, is_fused=True, projections=names,
        )  # fmt: skip
        if not self.num_experts:
            return shared
        experts = load_stacked_experts(
            weights, prefix.replace(".mlp", ".block_sparse_moe"), config.hidden_size, config.intermediate_size,
            num_experts=self.num_experts, top_k=self.top_k, router="router.layer",
            projections=("input_linear.weight", "output_linear.weight"),
        )  # fmt: skip
        return replace(experts, shared=shared)


@dataclass(frozen=True, kw_only=True)
class Bamba(MambaHybrid):
    """Half of each head is rotated; every layer has an MLP."""

    model_type = "bamba"
    own_fields = GRANITE_FIELDS.names | words(
        "attn_layer_indices attn_rotary_emb layers_block_type layer_types num_logits_to_keep z_loss_coefficient"
    )
    default_num_kv_heads = 8
    default_rms_norm_eps = 1e-5
    default_rotary_factor = 0.5
    rotates_part = True
    norms = LayerNorms("input_layernorm", "pre_ff_layernorm")
    final_norm_name: ClassVar[str] = "model.final_layernorm.weight"

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Bamba:
        bias, mamba = config.boolean("attention_bias", False), cls.default_mamba.read(config, cls.mamba_fields)
        is_state = layers_without(config, num_layers, "attn_layer_indices") or (True,) * num_layers
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.boolean("mlp_bias", False),
            states=StateShape.of(is_state, mamba.num_runs, mamba.run_size),
            mamba=mamba,
        )

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        return super().load_mlp(weights, prefix.replace(".mlp", ".feed_forward"), config, index)
