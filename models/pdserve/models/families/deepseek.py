"""DeepSeek V2 and V3, and models with their code, such as Kimi K2: latent attention and many small experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from pdserve.kernels.cpu.linear import make_linear
from pdserve.models.config.family_fields import words
from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.gated_mlp import GatedMlp
from pdserve.models.layers.routing import GroupedRouter
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader

_MAX_EXPERTS, _MAX_WIDTH = 1 << 14, 1 << 20


@dataclass(frozen=True, kw_only=True)
class _DeepSeek(ModelFamily):
    own_fields = LATENT_FIELDS | words(
        "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group topk_group "
        "first_k_dense_replace moe_layer_freq norm_topk_prob routed_scaling_factor topk_method scoring_func aux_loss_alpha seq_aux "
        "num_nextn_predict_layers num_mtp_layers"
    )

    num_experts: int
    top_k: int
    num_shared: int
    """Experts that every token has, in one MLP of as many times the size; 0: none."""
    expert_size: int
    """Inner size I of an expert."""
    num_groups: int
    kept_groups: int
    first_sparse: int
    """The first layer with experts."""
    normalise: bool
    routing_scale: float

    default_latent = LatentShape(1536, 512, 128, 64, 128, rotates_neighbours=True)
    routing: ClassVar[Mapping[str, str]] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    """Fields that name the only routing that there is."""
    default_dense_layers: ClassVar[int] = 3
    has_routing_bias: ClassVar[bool] = True
    """True: scores are sigmoids, and a bias corrects the choice."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> _DeepSeek:
        latent = cls.default_latent.read(config)
        num_experts = config.integer("n_routed_experts", 256, maximum=_MAX_EXPERTS)
        top_k = config.integer("num_experts_per_tok", 8, maximum=num_experts)
        num_groups, kept_groups = cls.groups(config)
        if num_experts % num_groups:
            raise config.error("n_group", f"a divisor of n_routed_experts ({num_experts})")
        if kept_groups > num_groups:
            raise config.error("topk_group", f"at most n_group ({num_groups})")
        if top_k > kept_groups * (num_experts // num_groups):
            raise config.error("num_experts_per_tok", f"at most the experts of topk_group ({kept_groups}) groups")
        if config.integer("moe_layer_freq", 1) != 1:
            raise config.error("moe_layer_freq", "1")
        for name, value in cls.routing.items():
            if config.text(name, value) != value:
                raise config.error(name, f'"{value}"')
        has_bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=config.boolean("mlp_bias", False),
            latent=latent,
            num_experts=num_experts,
            top_k=top_k,
            num_shared=config.integer("n_shared_experts", 1, minimum=0, maximum=_MAX_EXPERTS),
            expert_size=config.integer("moe_intermediate_size", 2048, maximum=_MAX_WIDTH),
            num_groups=num_groups,
            kept_groups=kept_groups,
            first_sparse=config.integer("first_k_dense_replace", cls.default_dense_layers, minimum=0),
            normalise=cls.has_routing_bias and config.boolean("norm_topk_prob", True),
            routing_scale=config.number("routed_scaling_factor", 2.5 if cls.has_routing_bias else 1.0),
        )

    @classmethod
    def groups(cls, config: JsonObject) -> tuple[int, int]:
        """Groups of experts, and how many of them a token may have."""
        return config.integer("n_group", 8), config.integer("topk_group", 4)

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Layers after the last one draft tokens (multi-token prediction), and are not computed."""
        found = re.match(r"model\.layers\.(\d+)\.", weight)
        return found is not None and int(found[1]) >= num_layers

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return super().inner_sizes(intermediate_size) | {"moe_intermediate_size": self.expert_size}

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        if index < self.first_sparse:
            return super().load_mlp(weights, prefix, config, index)
        gate = weights.tensor(f"{prefix}.gate.weight", self.num_experts, config.hidden_size, dtype=torch.float32)
        bias = None
        if self.has_routing_bias:
            bias = weights.tensor(f"{prefix}.gate.e_score_correction_bias", self.num_experts, dtype=torch.float32)
        router = GroupedRouter(
            make_linear(gate), self.top_k, self.normalise, self.num_groups, self.kept_groups, self.routing_scale, bias
        )
        shared = None
        if self.num_shared:
            size = self.num_shared * self.expert_size
            shared = GatedMlp.load(weights, f"{prefix}.shared_experts", config.hidden_size, size, bias=self.mlp_bias)
        return SparseMlp.load(
            weights, prefix, config.hidden_size, self.expert_size,
            num_experts=self.num_experts, router=router, shared=shared,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3(_DeepSeek):
    """V3 and R1."""

    model_type = "deepseek_v3"
    other_model_types = frozenset({"kimi_k2"})


@dataclass(frozen=True, kw_only=True)
class DeepSeekV2(_DeepSeek):
    """V2 and V2 Lite."""

    model_type = "deepseek_v2"
    default_dense_layers = 0
    has_routing_bias = False
    routing: ClassVar[Mapping[str, str]] = {"scoring_func": "softmax"}

    @classmethod
    def groups(cls, config: JsonObject) -> tuple[int, int]:
        method = config.text("topk_method", "greedy")
        if method == "greedy":
            return 1, 1
        if method != "group_limited_greedy":
            raise config.error("topk_method", "greedy or group_limited_greedy")
        return config.integer("n_group"), config.integer("topk_group")
