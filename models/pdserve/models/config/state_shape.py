"""`StateShape`: sizes of layers that keep a state per sequence in place of keys and values per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.models.json_object import JsonObject


@dataclass(frozen=True, slots=True)
class StateShape:
    """Of all ranks."""

    layers: tuple[bool, ...]
    """Per layer: True for a state."""
    num_heads: int
    """Parts that ranks share."""
    head_size: int
    """Numbers of a head's state in one layer."""

    @classmethod
    def of(cls, layers: tuple[bool, ...], num_heads: int, head_size: int) -> StateShape | None:
        """None: no layer has a state."""
        return cls(layers, num_heads, head_size) if any(layers) else None


def state_layers(
    config: JsonObject, num_layers: int, states: Sequence[str], attention: Sequence[str], field: str = "layer_types"
) -> tuple[bool, ...] | None:
    """Per layer, True for a state, by the names of both kinds in a field; None without it. Raises: ConfigError."""
    kinds = config.items(field)
    if kinds is None:
        return None
    names = [*states, *attention]
    if len(kinds) != num_layers or any(kind not in names for kind in kinds):
        raise config.error(field, f"{num_layers} times {' or '.join(names)}")
    return tuple(kind in states for kind in kinds)


def layers_without(config: JsonObject, num_layers: int, field: str) -> tuple[bool, ...] | None:
    """Per layer, False for those whose numbers a field lists; None without it. Raises: ConfigError."""
    listed = config.items(field)
    if listed is None:
        return None
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in listed):
        raise config.error(field, f"numbers of layers, 0 to {num_layers - 1}")
    return tuple(layer not in listed for layer in range(num_layers))
