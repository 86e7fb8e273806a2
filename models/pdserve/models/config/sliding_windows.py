"""Sliding windows per layer, in the forms in which families write them in config.json."""

from __future__ import annotations

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

WINDOW_FIELDS = words("sliding_window use_sliding_window")
_DEFAULT_WINDOW = 4096
_LAYER_TYPES = ("sliding_attention", "full_attention")


def window_of_all_layers(config: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    """`sliding_window` for each layer: 4096 if the field is absent, None if it is null. Raises: ConfigError."""
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", _DEFAULT_WINDOW)
    return (window,) * num_layers


def windows_by_layer_type(config: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` names, or from `max_window_layers` on, if `use_sliding_window` is true.

    Raises: ConfigError, UnsupportedModel.
    """
    layer_types = config.items("layer_types")
    if not config.boolean("use_sliding_window", False) or config.is_null("sliding_window"):
        if "sliding_attention" in (layer_types or ()):
            # transformers fails here too: the layer would have no window width
            raise UnsupportedModel(
                f"{config.where}: layer_types has sliding_attention, but no sliding window is in use"
            )
        return (None,) * num_layers
    window = config.integer("sliding_window", _DEFAULT_WINDOW)
    if layer_types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers or any(kind not in _LAYER_TYPES for kind in layer_types):
        raise config.error("layer_types", f"{num_layers} times sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
