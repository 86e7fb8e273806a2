"""Nemotron-H and Nemotron 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.models.config.expert_shape import GROUPED_EXPERT_FIELDS, MAX_EXPERT_SIZE, ExpertShape
from pdserve.models.config.family_fields import words
from pdserve.models.config.mamba2_shape import NEMOTRON_FIELDS, Mamba2Shape
from pdserve.models.config.model_config import MAX_LAYERS, ModelConfig
from pdserve.models.config.state_shape import StateShape
from pdserve.models.families.mamba_hybrids import MambaHybrid
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer, FeedForward
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.routing import load_grouped_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader

_STATE, _ATTENTION, _EXPERTS, _MLP = "linear_attention", "full_attention", "moe", "mlp"
_KINDS: Mapping[str, str] = {
    "M": _STATE, "*": _ATTENTION, "E": _EXPERTS, "-": _MLP, "mamba": _STATE, "attention": _ATTENTION,
} | {kind: kind for kind in (_STATE, _ATTENTION, _EXPERTS, _MLP)}  # fmt: skip
"""Letters of a pattern, and names in lists -> what a layer of the checkpoint is."""
_PATTERN, _LISTS = "hybrid_override_pattern", ("layers_block_type", "layer_types")
_PROJECTIONS = ("up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class NemotronH(MambaHybrid):
    """A layer of the checkpoint is Mamba 2, attention, an MLP or experts; here the last two belong to the layer before them.

    MLPs and experts have no gate, and attention does not rotate. Experts may take and give fewer numbers than a hidden state has.
    """

    regroups_layers = True
    model_type = "nemotron_h"
    own_fields = (
        NEMOTRON_FIELDS.names
        | GROUPED_EXPERT_FIELDS
        | words(
            "mlp_hidden_act mamba_hidden_act moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_latent_size"
        )
        | words("num_nextn_predict_layers mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep")
        | {_PATTERN, *_LISTS}
    )
    layers_field = _LISTS[0]
    default_num_kv_heads = 8
    default_head_dim = 128
    norm_eps_field = "layer_norm_epsilon"
    default_rms_norm_eps = 1e-5
    activation_field = "mlp_hidden_act"
    activations = ("relu2",)
    published_prefix = "backbone."
    embedding_name: ClassVar[str] = "model.embeddings.weight"
    final_norm_name: ClassVar[str] = "model.norm_f.weight"
    mamba_fields = NEMOTRON_FIELDS
    default_mamba = Mamba2Shape(head_dim=64, state_size=128, num_groups=8)
    default_experts: ClassVar[ExpertShape] = ExpertShape(8, 2, 7688)

    places: tuple[tuple[int, int | None], ...]
    """Per layer, the numbers of its two layers in the checkpoint; None: it has no MLP, nor experts."""
    sparse_layers: tuple[bool, ...]
    """Per layer: True if it has experts."""
    experts: ExpertShape
    shared_size: int
    """Inner size of the MLP that every token has next to its experts."""
    latent_size: int
    """Numbers that an expert takes and gives; 0: those of a hidden state."""

    @classmethod
    def read_num_layers(cls, config: JsonObject) -> int:
        return len(_places(config, _kinds(config)))

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> NemotronH:
        mamba, kinds = cls.default_mamba.read(config, cls.mamba_fields), _kinds(config)
        places, experts = _places(config, kinds), cls.default_experts.read(config)
        if experts.num_shared != 1:
            raise config.error("n_shared_experts", "1")
        if config.text("mamba_hidden_act", "silu") != "silu":
            raise config.error("mamba_hidden_act", '"silu"')
        has_latent = config.has("moe_latent_size")
        return cls(
            sliding_windows=(None,) * num_layers,
            mlp_bias=config.boolean("mlp_bias", False),
            unrotated_layers=frozenset(range(num_layers)),
            states=StateShape.of(tuple(kinds[place] == _STATE for place, _ in places), mamba.num_runs, mamba.run_size),
            mamba=mamba,
            places=places,
            sparse_layers=tuple(place is not None and kinds[place] == _EXPERTS for _, place in places),
            experts=experts,
            shared_size=config.integer("moe_shared_expert_intermediate_size", 7688, maximum=MAX_EXPERT_SIZE),
            latent_size=config.integer("moe_latent_size", maximum=MAX_EXPERT_SIZE) if has_latent else 0,
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = super().inner_sizes(intermediate_size)
        if sum(self.sparse_layers) == sum(place is not None for _, place in self.places):
            sizes.pop(self.intermediate_size_field)
        if any(self.sparse_layers):
            sizes |= {
                "moe_intermediate_size": self.experts.size, "moe_shared_expert_intermediate_size": self.shared_size,
            }  # fmt: skip
        return sizes

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Layers that draft have names of their own."""
        return weight.startswith("mtp.")

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer:
        mixer, mlp = (None if place is None else f"model.layers.{place}" for place in self.places[index])
        return DecoderLayer(
            input_norm=self.load_norm(weights, f"{mixer}.norm.weight", config),
            attention=self.load_attention(weights, f"{mixer}.mixer", config, index),
            mlp_norm=None if mlp is None else self.load_norm(weights, f"{mlp}.norm.weight", config),
            mlp=None if mlp is None else self.load_mlp(weights, f"{mlp}.mixer", config, index),
        )

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        hidden, is_sparse = config.hidden_size, self.sparse_layers[index]

        def mlp(name: str, inner_size: int) -> Mlp:
            return Mlp.load(
                weights, name, hidden, inner_size,
                bias=self.mlp_bias, activation=self.activations[0], projections=_PROJECTIONS,
            )  # fmt: skip

        def linear(name: str, rows: int, columns: int) -> Linear:
            bias = weights.tensor(f"{prefix}.{name}.bias", rows) if self.mlp_bias else None
            return make_linear(weights.matrix(f"{prefix}.{name}", rows, columns), bias)

        if not is_sparse:
            return mlp(prefix, config.intermediate_size)
        experts, gate = self.experts, f"{prefix}.gate"
        router = load_grouped_router(
            weights, gate, hidden, experts.num_experts, experts.top_k, bias=f"{gate}.e_score_correction_bias",
            normalise=experts.normalise, scale=experts.scale, num_groups=experts.num_groups, kept_groups=experts.kept_groups,
        )  # fmt: skip
        found = SparseMlp.load(
            weights, prefix, self.latent_size or hidden, experts.size, num_experts=experts.num_experts, router=router,
            shared=mlp(f"{prefix}.shared_experts", self.shared_size), projections=_PROJECTIONS,
            activation=self.activations[0],
        )  # fmt: skip
        if not self.latent_size:
            return found
        return replace(
            found,
            narrow=linear("fc1_latent_proj", self.latent_size, hidden),
            widen=linear("fc2_latent_proj", hidden, self.latent_size),
        )


def _kinds(config: JsonObject) -> list[str]:
    """What each layer of the checkpoint is. Raises: ConfigError."""
    field = next((name for name in (*_LISTS, _PATTERN) if config.has(name)), _LISTS[0])
    listed = list(config.text(field)) if field == _PATTERN else config.items(field)
    if listed is None:
        raise ConfigError(f"{config.where}: {field} is missing")
    known = [name for name in _KINDS if (len(name) == 1) == (field == _PATTERN)]
    if not 0 < len(listed) <= MAX_LAYERS or any(kind not in known for kind in listed):
        raise config.error(field, f"1 to {MAX_LAYERS} of {', '.join(known)}")
    if config.integer("num_hidden_layers", len(listed)) != len(listed):
        raise config.error("num_hidden_layers", f"the number of layers of {field} ({len(listed)})")
    return [_KINDS[str(kind)] for kind in listed]


def _places(config: JsonObject, kinds: list[str]) -> tuple[tuple[int, int | None], ...]:
    """See `NemotronH.places`. Raises: UnsupportedModel for an MLP that follows no other layer, or another MLP."""
    found: list[tuple[int, int | None]] = []
    for place, kind in enumerate(kinds):
        if kind in (_STATE, _ATTENTION):
            found.append((place, None))
        elif found and found[-1][0] == place - 1:
            found[-1] = place - 1, place
        else:
            raise UnsupportedModel(
                f"{config.where}: layer {place} ({kind}) follows no layer with attention or a state, which is not served"
            )
    return tuple(found)
