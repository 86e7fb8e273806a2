"""Qwen3.5: text models, and those with images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.mrope import read_mrope, without_mrope
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.families.delta_nets import DeltaNets
from pdserve.models.families.qwen2_moe import Qwen2Moe
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.layers.stacked_experts import load_stacked_experts
from pdserve.models.weights.weight_loader import WeightLoader

_FIELDS = DeltaNets.delta_fields | words("attn_output_gate output_gate_type")
_GATES = ("silu", "swish")
"""Names of the activation of the gates in the delta nets."""


@dataclass(frozen=True, kw_only=True)
class Qwen35(DeltaNets):
    """The layers of Qwen3-Next with MLPs. Positions have three axes, which agree in texts."""

    model_type = "qwen3_5_text"
    own_fields = _FIELDS
    default_num_kv_heads = 4
    splits_inputs = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen35:
        return cls(**cls.read_layers(config, num_layers))

    @classmethod
    def read_layers(cls, config: JsonObject, num_layers: int) -> dict[str, Any]:
        if not config.boolean("attn_output_gate", True):
            raise config.error("attn_output_gate", "true")
        if config.text("output_gate_type", _GATES[0]) not in _GATES:
            raise config.error("output_gate_type", " or ".join(f'"{name}"' for name in _GATES))
        return super().read_layers(config, num_layers)

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        rope = super().read_rope(without_mrope(config), head_dim, max_positions)
        if not cls.has_images:
            return rope
        pairs = (head_dim - rope.unrotated_dim) // 2
        return replace(rope, mrope=read_mrope(config, pairs, (11, 11, 10), is_interleaved=True))


@dataclass(frozen=True, kw_only=True)
class Qwen35Moe(Qwen35, Qwen2Moe):
    """Every layer has experts, in one tensor per projection or in tensors of their own."""

    model_type = "qwen3_5_moe_text"
    own_fields = _FIELDS | EXPERT_FIELDS | words("moe_intermediate_size shared_expert_intermediate_size")
    intermediate_size_field = "moe_intermediate_size"
    default_num_kv_heads = 2
    qk_norm = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen35Moe:
        num_experts, top_k = read_experts(config, default_experts=256, default_top_k=8)
        return cls(
            **cls.read_layers(config, num_layers),
            num_experts=num_experts,
            top_k=top_k,
            expert_size=config.integer("moe_intermediate_size", 512, maximum=MAX_EXPERT_SIZE),
            normalise=True,
            sparse_layers=(True,) * num_layers,
            shared_size=config.integer("shared_expert_intermediate_size", 512, maximum=MAX_EXPERT_SIZE),
        )

    def load_routed_experts(self, weights: WeightLoader, prefix: str, config: ModelConfig) -> SparseMlp:
        if weights.shape(f"{prefix}.experts.gate_up_proj") is None:
            return super().load_routed_experts(weights, prefix, config)
        return load_stacked_experts(
            weights, prefix, config.hidden_size, self.expert_size,
            num_experts=self.num_experts, top_k=self.top_k, router="gate",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen35VL(Qwen35):
    """With the vision encoder of Qwen3-VL, without deepstack."""

    model_type = "qwen3_5"
    own_fields = Qwen35.own_fields | {"vision_config"}
    has_images = True


@dataclass(frozen=True, kw_only=True)
class Qwen35VLMoe(Qwen35Moe):
    """With the vision encoder of Qwen3-VL, without deepstack."""

    model_type = "qwen3_5_moe"
    own_fields = Qwen35Moe.own_fields | {"vision_config"}
    has_images = True
