"""Sliding windows per layer, in the forms in which families write them in config.json."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

WINDOW_FIELDS = words("sliding_window use_sliding_window")
_DEFAULT_WINDOW = 4096
_LAYER_TYPES = ("sliding_attention", "full_attention")


def window_of_all_layers(
    config: JsonObject, num_layers: int, *, default: int | None = _DEFAULT_WINDOW
) -> tuple[int | None, ...]:
    """`sliding_window` for each layer: `default` if the field is absent, None if it is null. Raises: ConfigError."""
    return (_window(config, default),) * num_layers


def windows_by_layer_type(
    config: JsonObject,
    num_layers: int,
    *,
    default_types: Sequence[str] | None = None,
    default_window: int | None = _DEFAULT_WINDOW,
) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` names if `use_sliding_window` is true.

    default_types: used without the list; None: windows from `max_window_layers` on. default_window: used without `sliding_window`.
    Raises: ConfigError, UnsupportedModel.
    """
    window = _window(config, default_window) if config.boolean("use_sliding_window", False) else None
    if window is None:
        if "sliding_attention" in (config.items("layer_types") or ()):
            # transformers fails here too: the layer would have no window width
            raise UnsupportedModel(
                f"{config.where}: layer_types has sliding_attention, but no sliding window is in use"
            )
        return (None,) * num_layers
    if default_types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        default_types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return _windows(config, default_types, window)


def windows_of_types(
    config: JsonObject, default_types: Sequence[str], *, default_window: int | None = _DEFAULT_WINDOW
) -> tuple[int | None, ...]:
    """`sliding_window` in the layers that `layer_types` names. default_types: per layer, without the list. Raises: ConfigError,
    UnsupportedModel."""
    window = _window(config, default_window)
    windows = _windows(config, default_types, window or 1)
    if window is None and any(windows):
        raise UnsupportedModel(f"{config.where}: layer_types has sliding_attention, but sliding_window is null")
    return windows


def _window(config: JsonObject, default: int | None) -> int | None:
    if config.is_null("sliding_window") or (default is None and not config.has("sliding_window")):
        return None
    return config.integer("sliding_window", default)


def _windows(config: JsonObject, default_types: Sequence[str], window: int) -> tuple[int | None, ...]:
    found = config.items("layer_types")
    layer_types = list(default_types) if found is None else found
    num_layers = len(default_types)
    if len(layer_types) != num_layers or any(kind not in _LAYER_TYPES for kind in layer_types):
        raise config.error("layer_types", f"{num_layers} times sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
