"""Models with only Mamba layers: Mamba, Falcon Mamba and Mamba 2."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from pdserve.models.config.family_fields import words
from pdserve.models.config.mamba2_shape import MAMBA_FIELDS, Mamba2Shape
from pdserve.models.config.mamba_shape import MambaShape
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.state_shape import StateShape
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, DecoderLayer
from pdserve.models.layers.mamba import Mamba
from pdserve.models.layers.mamba2 import Mamba2
from pdserve.models.weights.weight_loader import WeightLoader

_MAX_INNER = 1 << 20
_FIELDS = words(
    "state_size expand conv_kernel use_bias use_conv_bias layer_norm_epsilon residual_in_fp32 rescale_prenorm_residual "
    "time_step_rank time_step_scale time_step_init_scheme time_step_min time_step_max time_step_floor time_step_limit "
    "use_mambapy use_associative_scan layer_types intermediate_size d_model d_inner n_layer ssm_cfg rms_norm "
    "fused_add_norm pad_vocab_size_multiple"
)


@dataclass(frozen=True, kw_only=True)
class MambaAlone(ModelFamily):
    """Each layer is a norm and a mixer with a state; there is no attention, and no MLP."""

    has_attention = False
    norm_eps_field: ClassVar[str] = "layer_norm_epsilon"
    default_rms_norm_eps = 1e-5
    published_prefix = "backbone."
    embedding_name: ClassVar[str] = "model.embeddings.weight"
    final_norm_name: ClassVar[str] = "model.norm_f.weight"

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer:
        prefix = prefix or f"model.layers.{index}"
        return DecoderLayer(
            input_norm=self.load_norm(weights, f"{prefix}.norm.weight", config),
            attention=self.load_attention(weights, f"{prefix}.mixer", config, index),
            mlp_norm=None,
            mlp=None,
        )

    @abstractmethod
    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        """The mixer. Raises: ConfigError."""


@dataclass(frozen=True, kw_only=True)
class MambaModel(MambaAlone):
    """Mamba, the first version."""

    model_type = "mamba"
    own_fields = _FIELDS
    default_tie_word_embeddings = True

    mamba: MambaShape

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> MambaModel:
        mamba = cls.read_shape(config)
        return cls(
            sliding_windows=(None,) * num_layers,
            unrotated_layers=frozenset(range(num_layers)),
            states=StateShape.of((True,) * num_layers, mamba.num_parts, mamba.part_size),
            mamba=mamba,
        )

    @classmethod
    def read_shape(cls, config: JsonObject) -> MambaShape:
        """Raises: ConfigError."""
        found = MambaShape.read(config)
        return replace(found, inner_size=config.integer("intermediate_size", found.inner_size, maximum=_MAX_INNER))

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return self.mamba.shared_sizes("intermediate_size")

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        place, spec = config.kv_cache_place(index)[1], config.state_spec(index)
        return Mamba.load(weights, prefix, place, spec, self.mamba, config.hidden_size)


@dataclass(frozen=True, kw_only=True)
class FalconMamba(MambaModel):
    """Steps, b and c are normalised, without weights."""

    model_type = "falcon_mamba"
    own_fields = _FIELDS | words("mixer_rms_eps use_falcon_mambapy")

    @classmethod
    def read_shape(cls, config: JsonObject) -> MambaShape:
        eps = config.number("mixer_rms_eps", 1e-6)
        return replace(super().read_shape(config), norms="plain", norm_eps=eps)


@dataclass(frozen=True, kw_only=True)
class Mamba2Model(MambaAlone):
    """Mamba 2."""

    model_type = "mamba2"
    own_fields = _FIELDS | MAMBA_FIELDS.names | words("norm_before_gate")
    default_mamba: ClassVar[Mamba2Shape] = Mamba2Shape(state_size=128, num_groups=8)

    mamba: Mamba2Shape

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Mamba2Model:
        mamba = cls.default_mamba.read(config, MAMBA_FIELDS)
        return cls(
            sliding_windows=(None,) * num_layers,
            unrotated_layers=frozenset(range(num_layers)),
            states=StateShape.of((True,) * num_layers, mamba.num_runs, mamba.run_size),
            mamba=mamba,
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return self.mamba.shared_sizes(MAMBA_FIELDS.num_heads)

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        return Mamba2.load(
            weights, prefix, config.kv_cache_place(index)[1], config.state_spec(index), self.mamba, config.hidden_size,
            config.rms_norm_eps,
        )  # fmt: skip
