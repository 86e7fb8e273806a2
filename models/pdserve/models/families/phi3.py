"""Phi-3 and Phi-4, the dense text models."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.model_config import ModelFamily
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.config.sliding_windows import window_of_all_layers
from pdserve.models.json_object import JsonObject

_ORIGINAL_POSITIONS = 4096
"""`original_max_position_embeddings` where config.json has none; the rope parameters are not asked."""
_ROPE_TYPES = ("default", "longrope")


@dataclass(frozen=True)
class Phi3(ModelFamily):
    """Fused projections; a part of each head may be unrotated; the same window in all layers, or none."""

    model_type = "phi3"
    own_fields = frozenset({"sliding_window"})
    default_rms_norm_eps = 1e-5
    rotates_part = True
    has_fused_qkv = True
    has_fused_mlp = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Phi3:
        return cls(window_of_all_layers(config, num_layers, default=None))

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        rope = RopeParameters.from_config(
            config, head_dim, max_positions, may_be_partial=True, default_original=_ORIGINAL_POSITIONS
        )
        if rope.rope_type not in _ROPE_TYPES:
            raise UnsupportedModel(
                f"{config.where}: rope type {rope.rope_type!r}; supported for Phi3ForCausalLM: {', '.join(_ROPE_TYPES)}"
            )
        return rope
