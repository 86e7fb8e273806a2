"""Rotary embeddings that differ between layers with windows and layers without."""

from __future__ import annotations

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.json_object import JsonObject

_LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_of_layer_type(
    config: JsonObject,
    layer_type: str,
    head_dim: int,
    max_positions: int,
    default_theta: float,
    *,
    default_rotary_factor: float | None = None,
) -> RopeParameters:
    """`rope_parameters` of `layer_type`; `rope_scaling`, as older files have it, is only for layers without windows.

    default_theta: used where `rope_parameters` has none. default_rotary_factor: part of a head that is rotated, likewise; None: all
    of it. Raises: ConfigError, UnsupportedModel.
    """
    by_type = config.child("rope_parameters") or JsonObject({}, config.where)
    for name in by_type.names:
        if name not in _LAYER_TYPES:
            raise UnsupportedModel(
                f"{by_type.where}: {name[:80]} is {by_type.shown(name)}; known are {', '.join(_LAYER_TYPES)}"
            )
    given = by_type.child(layer_type)
    fields = {} if given is None else {name: given.get(name) for name in given.names}
    if layer_type == "full_attention" and (scaling := config.child("rope_scaling")) is not None:
        fields |= {name: scaling.get(name) for name in scaling.names}
    # transformers looks for it next to the layer types, where it is not
    fields.pop("truncate", None)
    alone = JsonObject({"rope_parameters": fields}, config.where)
    return RopeParameters.from_config(
        alone, head_dim, max_positions, default_theta=default_theta,
        default_rotary_factor=default_rotary_factor or 1.0, may_be_partial=default_rotary_factor is not None,
    )  # fmt: skip
