"""Jamba: Mamba in most layers, attention without positions in the others, and experts in every second layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.family_fields import words
from pdserve.models.config.mamba_shape import MambaShape
from pdserve.models.config.model_config import LayerNorms, ModelConfig, ModelFamily
from pdserve.models.config.state_shape import StateShape
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, FeedForward
from pdserve.models.layers.mamba import Mamba
from pdserve.models.layers.routing import load_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Jamba(ModelFamily):
    """A layer with Mamba keeps its state per sequence, and no keys."""

    model_type = "jamba"
    own_fields = EXPERT_FIELDS | words(
        "mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank mamba_conv_bias mamba_proj_bias mamba_inner_layernorms "
        "use_mamba_kernels use_mambapy use_associative_scan attn_layer_period attn_layer_offset expert_layer_period "
        "expert_layer_offset layer_types layers_block_type"
    )
    default_num_kv_heads = 8
    norms = LayerNorms("input_layernorm", "pre_ff_layernorm")
    final_norm_name: ClassVar[str] = "model.final_layernorm.weight"

    mamba: MambaShape
    num_experts: int
    top_k: int
    sparse_layers: tuple[bool, ...]
    """Per layer: True if it has experts."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Jamba:
        mamba = replace(
            MambaShape.read(
                config, state_size="mamba_d_state", expand="mamba_expand", conv_length="mamba_d_conv",
                step_rank="mamba_dt_rank", conv_bias="mamba_conv_bias", bias="mamba_proj_bias",
            ),
            norms="weighted",
            norm_eps=config.number("rms_norm_eps", cls.default_rms_norm_eps),
        )  # fmt: skip
        if not config.boolean("mamba_inner_layernorms", True):
            raise config.error("mamba_inner_layernorms", "true")
        attends = _every(config, "attn_layer", num_layers, default_period=8, default_offset=4)
        num_experts, top_k = read_experts(config, default_experts=16, default_top_k=2)
        sparse = _every(config, "expert_layer", num_layers, default_period=2, default_offset=1)
        return cls(
            sliding_windows=(None,) * num_layers,
            unrotated_layers=frozenset(range(num_layers)),
            states=StateShape.of(tuple(not each for each in attends), mamba.num_parts, mamba.part_size),
            mamba=mamba,
            num_experts=num_experts,
            top_k=top_k,
            sparse_layers=tuple(each and num_experts > 1 for each in sparse),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return super().inner_sizes(intermediate_size) | self.mamba.shared_sizes("mamba_expand")

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        if not config.has_state(index):
            return super().load_attention(weights, prefix, config, index)
        place, spec = config.kv_cache_place(index)[1], config.state_spec(index)
        return Mamba.load(weights, prefix.replace(".self_attn", ".mamba"), place, spec, self.mamba, config.hidden_size)

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        prefix = prefix.replace(".mlp", ".feed_forward")
        if not self.sparse_layers[index]:
            return super().load_mlp(weights, prefix, config, index)
        hidden = config.hidden_size
        router = load_router(weights, prefix, hidden, self.num_experts, self.top_k, normalise=False, name="router")
        return SparseMlp.load(
            weights, prefix, hidden, config.intermediate_size, num_experts=self.num_experts, router=router
        )


def _every(
    config: JsonObject, name: str, num_layers: int, *, default_period: int, default_offset: int
) -> tuple[bool, ...]:
    """Per layer: True for each of a period at an offset, by two fields. Raises: ConfigError."""
    period = config.integer(f"{name}_period", default_period)
    offset = config.integer(f"{name}_offset", default_offset, minimum=0)
    if offset >= period:
        raise config.error(f"{name}_offset", f"less than {name}_period ({period})")
    return tuple(layer % period == offset for layer in range(num_layers))
