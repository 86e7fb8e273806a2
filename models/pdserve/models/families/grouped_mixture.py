"""`GroupedMixture`: families with the experts of DeepSeek V2 and V3, and any attention."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pdserve.models.config.expert_shape import GROUPED_EXPERT_FIELDS, ExpertShape
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.draft_head import DraftNames
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.routing import load_grouped_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader

MIXTURE_FIELDS = GROUPED_EXPERT_FIELDS | words(
    "first_k_dense_replace moe_layer_freq scoring_func topk_method aux_loss_alpha seq_aux num_nextn_predict_layers num_mtp_layers"
)
_MLP_TYPES = ("dense", "sparse")


@dataclass(frozen=True, kw_only=True)
class GroupedMixture(ModelFamily, ABC):
    """Layers with an MLP come first; in the others a token has the best experts of the best groups, and shared ones."""

    experts: ExpertShape
    sparse_layers: tuple[bool, ...]
    """Per layer: True if it has experts."""

    default_experts: ClassVar[ExpertShape]
    default_dense_layers: ClassVar[int] = 1
    """Layers before the first one with experts, if config.json does not say."""
    routing: ClassVar[Mapping[str, tuple[str, ...]]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    """Fields that name the only routing that there is, with its names."""
    has_draft_layers = True
    draft_names: ClassVar[DraftNames | None] = DraftNames(
        "model.layers.{}", "", "enorm", "hnorm", "eh_proj", "shared_head.norm",
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    )  # fmt: skip
    expert_projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    has_routing_bias: ClassVar[bool] = True
    """True: scores are sigmoids, and a bias corrects the choice."""
    may_lack_routing_bias: ClassVar[bool] = False
    """True: checkpoints without it have zeros."""

    @classmethod
    def read_experts(cls, config: JsonObject, *, has_groups: bool = True) -> ExpertShape:
        """has_groups: see `ExpertShape.read`. Raises: ConfigError."""
        for field, names in cls.routing.items():
            if config.text(field, names[0]) not in names:
                raise config.error(field, " or ".join(f'"{name}"' for name in names))
        return cls.default_experts.read(config, has_groups=has_groups)

    @classmethod
    def read_sparse_layers(cls, config: JsonObject, num_layers: int) -> tuple[bool, ...]:
        """`mlp_layer_types` of families that have it, or the layers from `first_k_dense_replace` on. Raises: ConfigError."""
        if config.integer("moe_layer_freq", 1) != 1:
            raise config.error("moe_layer_freq", "1")
        first = config.integer("first_k_dense_replace", cls.default_dense_layers, minimum=0)
        found = config.items("mlp_layer_types") if "mlp_layer_types" in cls.own_fields else None
        if found is None:
            return tuple(layer >= first for layer in range(num_layers))
        if len(found) != num_layers or any(kind not in _MLP_TYPES for kind in found):
            raise config.error("mlp_layer_types", f"{num_layers} times dense or sparse")
        return tuple(kind == "sparse" for kind in found)

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = {} if all(self.sparse_layers) else super().inner_sizes(intermediate_size)
        return sizes | ({"moe_intermediate_size": self.experts.size} if any(self.sparse_layers) else {})

    def has_experts(self, layer: int) -> bool:
        """The draft head has them if any layer does."""
        return self.sparse_layers[layer] if layer < len(self.sparse_layers) else any(self.sparse_layers)

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        if not self.has_experts(index):
            return super().load_mlp(weights, prefix, config, index)
        experts, hidden, gate = self.experts, config.hidden_size, f"{prefix}.gate"
        router = load_grouped_router(
            weights, gate, hidden, experts.num_experts, experts.top_k,
            bias=f"{gate}.e_score_correction_bias" if self.has_routing_bias else None,
            may_lack_bias=self.may_lack_routing_bias, normalise=experts.normalise,
            scale=experts.scale, num_groups=experts.num_groups, kept_groups=experts.kept_groups,
        )  # fmt: skip
        shared = None
        if experts.num_shared:
            size = experts.num_shared * experts.size
            shared = Mlp.load(weights, f"{prefix}.shared_experts", hidden, size, bias=self.mlp_bias)
        return SparseMlp.load(
            weights, prefix, hidden, experts.size, num_experts=experts.num_experts, router=router, shared=shared,
            projections=self.expert_projections,
        )  # fmt: skip
