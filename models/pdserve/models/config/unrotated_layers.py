"""Layers without rotary positions, as SmolLM3 and Llama 4 write them in config.json."""

from __future__ import annotations

from pdserve.models.json_object import JsonObject


def read_unrotated_layers(config: JsonObject, num_layers: int) -> frozenset[int]:
    """Layers with 0 in `no_rope_layers`, or every layer of the interval. Raises: ConfigError."""
    rotated = config.items("no_rope_layers")
    if not rotated:
        interval = config.integer("no_rope_layer_interval", 4)
        return frozenset(range(interval - 1, num_layers, interval))
    if len(rotated) < num_layers or any(isinstance(flag, bool) or flag not in (0, 1) for flag in rotated):
        raise config.error("no_rope_layers", f"a 0 or 1 for each of {num_layers} layers")
    return frozenset(layer for layer in range(num_layers) if rotated[layer] == 0)
