"""`DeltaShape`: sizes of a gated delta net."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.errors import UnsupportedModel
from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

DELTA_FIELDS = words(
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
)
KIMI_FIELDS = words("linear_attn_config linear_num_heads linear_head_dim linear_conv_kernel_dim")
_IN_OBJECT = {
    "linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip
"""Names in `linear_attn_config` of published models."""
KIMI_LAYERS = ("kda_layers", "full_attn_layers")
"""The other fields there: numbers of layers, from 1 on, with a state and without."""
_MAX_SIZE = 1 << 14


@dataclass(frozen=True, slots=True)
class DeltaShape:
    num_key_heads: int
    values_per_key: int
    """Value heads of each key head."""
    key_dim: int
    value_dim: int
    conv_length: int

    @classmethod
    def read(cls, config: JsonObject) -> DeltaShape:
        """Raises: ConfigError."""
        key_heads = config.integer("linear_num_key_heads", 16, maximum=_MAX_SIZE)
        value_heads = config.integer("linear_num_value_heads", 32, maximum=_MAX_SIZE)
        if value_heads % key_heads:
            raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
        return cls(
            num_key_heads=key_heads,
            values_per_key=value_heads // key_heads,
            key_dim=config.integer("linear_key_head_dim", 128, maximum=_MAX_SIZE),
            value_dim=config.integer("linear_value_head_dim", 128, maximum=_MAX_SIZE),
            conv_length=config.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=_MAX_SIZE),
        )

    @classmethod
    def read_kimi(cls, config: JsonObject) -> DeltaShape:
        """Heads whose queries, keys and values have one size. Raises: ConfigError, UnsupportedModel."""
        found = config.child("linear_attn_config")
        if found is None:
            found = config
        elif others := [name for name in found.names if name not in (*KIMI_LAYERS, *_IN_OBJECT.values())]:
            raise UnsupportedModel(
                f"{found.where}: {others[0][:80]} is {found.shown(others[0])}; known are "
                f"{', '.join((*_IN_OBJECT.values(), *KIMI_LAYERS))}"
            )
        else:
            found = found.with_names(_IN_OBJECT)
        size = found.integer("linear_head_dim", 128, maximum=_MAX_SIZE)
        return cls(
            num_key_heads=found.integer("linear_num_heads", 32, maximum=_MAX_SIZE),
            values_per_key=1,
            key_dim=size,
            value_dim=size,
            conv_length=found.integer("linear_conv_kernel_dim", 4, minimum=2, maximum=_MAX_SIZE),
        )

    @property
    def channels_per_key(self) -> int:
        """Channels of the convolution of a key head: its query, key and values."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a key head's state."""
        matrices = self.values_per_key * self.key_dim * self.value_dim
        return self.channels_per_key * (self.conv_length - 1) + matrices
