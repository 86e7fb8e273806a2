"""LongCat-Flash."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pdserve.kernels.cpu.linear import make_linear
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE, MAX_EXPERTS
from pdserve.models.config.family_fields import words
from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.routing import BiasedRouter
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader

_ONLY: Mapping[str, object] = {
    "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "router_bias": False,
    "zero_expert_type": "identity", "rope_interleave": True,
}  # fmt: skip
"""Fields of published configurations with the one value that transformers computes, which does not read them."""


@dataclass(frozen=True, kw_only=True)
class LongcatFlash(ModelFamily):
    """A layer of the checkpoint is two here: each has latent attention and an MLP, and the first starts experts whose sum is added
    at the end of the second. Experts without weights return their input."""

    regroups_layers = True
    model_type = "longcat_flash"
    own_fields = (
        LATENT_FIELDS
        | words("num_layers ffn_hidden_size n_routed_experts zero_expert_num moe_topk expert_ffn_hidden_size")
        | words("routed_scaling_factor")
        | frozenset(_ONLY)
    )
    layers_field = "num_layers"
    attentions_per_layer = 2
    intermediate_size_field = "ffn_hidden_size"
    default_rms_norm_eps = 1e-5
    default_rope_theta = 1e7
    default_latent = LatentShape(1536, 512, 128, 64, 128, rotates_neighbours=True)

    num_experts: int
    num_identity: int
    """Experts without weights."""
    top_k: int
    """Experts per token, those without weights included."""
    expert_size: int
    """Inner size I of an expert."""
    routing_scale: float

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> LongcatFlash:
        for name, value in _ONLY.items():
            if config.has(name) and config.get(name) != value:
                raise config.error(name, json.dumps(value))
        in_config = num_layers // cls.attentions_per_layer
        if config.integer("num_hidden_layers", in_config) not in (in_config, num_layers):
            raise config.error(
                "num_hidden_layers", f"num_layers ({in_config}), or the number of attentions ({num_layers})"
            )
        num_experts = config.integer("n_routed_experts", 512, maximum=MAX_EXPERTS)
        num_identity = config.integer("zero_expert_num", 256, minimum=0, maximum=MAX_EXPERTS)
        has_bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            latent=cls._latent(config),
            num_experts=num_experts,
            num_identity=num_identity,
            top_k=config.integer("moe_topk", 12, maximum=num_experts + num_identity),
            expert_size=config.integer("expert_ffn_hidden_size", 2048, maximum=MAX_EXPERT_SIZE),
            routing_scale=config.number("routed_scaling_factor", 6.0),
        )

    @classmethod
    def _latent(cls, config: JsonObject) -> LatentShape:
        found, hidden_size = cls.default_latent.read(config), config.integer("hidden_size")
        if not found.q_lora_rank:
            raise config.error("q_lora_rank", "a number")
        if config.integer("qk_head_dim", found.query_dim) != found.query_dim:
            raise config.error("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim ({found.query_dim})")
        return replace(
            found,
            query_factor=math.sqrt(hidden_size / found.q_lora_rank),
            row_factor=math.sqrt(hidden_size / found.kv_lora_rank),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return super().inner_sizes(intermediate_size) | {"expert_ffn_hidden_size": self.expert_size}

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Layers that draft, and matrices of experts without weights, which transformers stores."""
        found = re.match(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.", weight)
        return weight.startswith("model.mtp.") or (found is not None and int(found[1]) >= self.num_experts)

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer:
        layer, half = divmod(index, self.attentions_per_layer)
        prefix, hidden = prefix or f"model.layers.{layer}", config.hidden_size
        return DecoderLayer(
            input_norm=self.load_norm(weights, f"{prefix}.input_layernorm.{half}.weight", config),
            attention=self.load_attention(weights, f"{prefix}.self_attn.{half}", config, index),
            mlp_norm=self.load_norm(weights, f"{prefix}.post_attention_layernorm.{half}.weight", config),
            mlp=Mlp.load(weights, f"{prefix}.mlps.{half}", hidden, config.intermediate_size, bias=False),
            shortcut=None if half else self._load_experts(weights, f"{prefix}.mlp", hidden),
        )

    def _load_experts(self, weights: WeightLoader, prefix: str, hidden_size: int) -> SparseMlp:
        name, all_experts = f"{prefix}.router", self.num_experts + self.num_identity
        logits = weights.tensor(f"{name}.classifier.weight", all_experts, hidden_size, dtype=torch.float32)
        bias = weights.tensor(f"{name}.e_score_correction_bias", all_experts, dtype=torch.float32)
        return SparseMlp.load(
            weights, prefix, hidden_size, self.expert_size, num_experts=self.num_experts, num_identity=self.num_identity,
            router=BiasedRouter(make_linear(logits), self.top_k, False, self.routing_scale, bias),
        )  # fmt: skip
