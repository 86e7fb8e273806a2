"""Qwen1.5-MoE and Qwen2-MoE."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.kernels.cpu.linear import make_linear
from pdserve.models.config.expert_counts import read_experts
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.sliding_windows import windows_by_layer_type
from pdserve.models.families.qwen3_moe import Qwen3Moe, read_sparse_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Qwen2Moe(Qwen3Moe):
    """Layers with experts also have one that every token has, with a weight of its own. Queries, keys and values have biases."""

    model_type = "qwen2_moe"
    own_fields = Qwen3Moe.own_fields | words("shared_expert_intermediate_size layer_types qkv_bias")
    default_num_kv_heads = 16
    qk_norm = False

    shared_size: int
    """Inner size of the expert that every token has."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen2Moe:
        num_experts, top_k = read_experts(config, default_experts=60, default_top_k=4)
        first_full = config.integer("max_window_layers", 28, minimum=0)
        kinds = [
            "full_attention" if layer % 2 or layer >= first_full else "sliding_attention" for layer in range(num_layers)
        ]
        return cls(
            sliding_windows=windows_by_layer_type(config, num_layers, default_types=kinds),
            qkv_bias=config.boolean("qkv_bias", True),
            num_experts=num_experts,
            top_k=top_k,
            expert_size=config.integer("moe_intermediate_size", 1408, maximum=MAX_EXPERT_SIZE),
            normalise=config.boolean("norm_topk_prob", False),
            sparse_layers=read_sparse_layers(config, num_layers, num_experts),
            shared_size=config.integer("shared_expert_intermediate_size", 5632, maximum=MAX_EXPERT_SIZE),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = super().inner_sizes(intermediate_size)
        return sizes | ({"shared_expert_intermediate_size": self.shared_size} if any(self.sparse_layers) else {})

    def load_experts(self, weights: WeightLoader, prefix: str, config: ModelConfig) -> SparseMlp:
        shared = Mlp.load(weights, f"{prefix}.shared_expert", config.hidden_size, self.shared_size, bias=False)
        gate = make_linear(weights.tensor(f"{prefix}.shared_expert_gate.weight", 1, config.hidden_size))
        return replace(self.load_routed_experts(weights, prefix, config), shared=shared, shared_gate=gate)

    def load_routed_experts(self, weights: WeightLoader, prefix: str, config: ModelConfig) -> SparseMlp:
        """Raises: ConfigError."""
        return super().load_experts(weights, prefix, config)
