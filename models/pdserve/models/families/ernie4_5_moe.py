"""ERNIE 4.5, the text models with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.cpu.linear import make_linear
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE, MAX_EXPERTS
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.routing import BiasedRouter
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Ernie45Moe(ModelFamily):
    """Llama's attention, which rotates neighbours; softmax probabilities, corrected by a bias, choose experts."""

    model_type = "ernie4_5_moe"
    own_fields = words(
        "use_bias moe_num_experts moe_k moe_intermediate_size moe_num_shared_experts moe_layer_start_index moe_layer_end_index "
        "moe_layer_interval moe_norm_min moe_capacity moe_use_aux_free num_nextn_predict_layers"
    )
    default_num_kv_heads = 4
    default_rms_norm_eps = 1e-5
    default_rope_theta = 5e5
    default_tie_word_embeddings = True
    rotates_neighbours = True

    num_experts: int
    top_k: int
    """Experts per token."""
    expert_size: int
    """Inner size I of an expert."""
    num_shared: int
    """Experts that every token has; 0: none."""
    sparse_layers: tuple[bool, ...]
    """Per layer: True if it has experts."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Ernie45Moe:
        if config.boolean("use_bias", False):
            raise config.error("use_bias", "false: the head would have a bias, too")
        if not config.boolean("moe_use_aux_free", True):
            raise config.error("moe_use_aux_free", "true")
        num_experts = config.integer("moe_num_experts", 64, maximum=MAX_EXPERTS)
        first = config.integer("moe_layer_start_index", 1, minimum=0)
        last = config.integer("moe_layer_end_index", -1, minimum=-1)
        last = num_layers - 1 if last == -1 else last
        interval = config.integer("moe_layer_interval", 1)
        return cls(
            sliding_windows=(None,) * num_layers,
            num_experts=num_experts,
            top_k=config.integer("moe_k", 6, maximum=num_experts),
            expert_size=config.integer("moe_intermediate_size", 1536, maximum=MAX_EXPERT_SIZE),
            num_shared=config.integer("moe_num_shared_experts", 2, minimum=0, maximum=MAX_EXPERTS),
            sparse_layers=tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers)),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = {} if all(self.sparse_layers) else super().inner_sizes(intermediate_size)
        return sizes | ({"moe_intermediate_size": self.expert_size} if any(self.sparse_layers) else {})

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Layers that draft have names of their own."""
        return weight.startswith("model.mtp_")

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        if not self.sparse_layers[index]:
            return super().load_mlp(weights, prefix, config, index)
        hidden, num_experts = config.hidden_size, self.num_experts
        logits = make_linear(weights.tensor(f"{prefix}.gate.weight", num_experts, hidden, dtype=torch.float32))
        name = f"{prefix}.moe_statics.e_score_correction_bias"
        bias = weights.tensor(name, 1, num_experts, dtype=torch.float32).flatten()
        shared = None
        if self.num_shared:
            size = self.num_shared * self.expert_size
            shared = Mlp.load(weights, f"{prefix}.shared_experts", hidden, size, bias=False)
        # no sum of probabilities is as small as moe_norm_min
        router = BiasedRouter(logits, self.top_k, True, 1.0, bias)
        return SparseMlp.load(
            weights, prefix, hidden, self.expert_size, num_experts=num_experts, router=router, shared=shared
        )
