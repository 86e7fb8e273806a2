"""`StateShape`: sizes of layers that keep a state per sequence in place of keys and values per token."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.errors import UnsupportedModel
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
    def of(cls, config: JsonObject, layers: tuple[bool, ...], num_heads: int, head_size: int) -> StateShape | None:
        """None: no layer has a state. Raises: UnsupportedModel if all have one, and no layer keys."""
        if all(layers):
            raise UnsupportedModel(
                f"{config.where}: each layer keeps a state, and none has attention, which is not served"
            )
        return cls(layers, num_heads, head_size) if any(layers) else None
