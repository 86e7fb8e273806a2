"""`MambaShape`: sizes of a Mamba layer, of the first version."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pdserve.models.json_object import JsonObject

_MAX_SIZE = 1 << 14
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class MambaShape:
    inner_size: int
    """Channels."""
    state_size: int
    """N"""
    step_rank: int
    """Numbers from which the steps of all channels are made."""
    conv_length: int
    conv_bias: bool
    projection_bias: bool
    norms: Literal["weighted", "plain"] | None = None
    """Of those numbers, of b and of c; plain: without weights; None: there are none."""
    norm_eps: float = 1e-6

    @classmethod
    def read(
        cls,
        config: JsonObject,
        *,
        state_size: str = "state_size",
        expand: str = "expand",
        conv_length: str = "conv_kernel",
        step_rank: str = "time_step_rank",
        conv_bias: str = "use_conv_bias",
        bias: str = "use_bias",
    ) -> MambaShape:
        """The arguments are names of fields. Raises: ConfigError."""
        hidden_size = config.integer("hidden_size")
        rank = -(-hidden_size // 16)
        if config.get(step_rank) != "auto":
            rank = config.integer(step_rank, rank, maximum=_MAX_SIZE)
        return cls(
            inner_size=config.integer(expand, 2, maximum=_MAX_SIZE) * hidden_size,
            state_size=config.integer(state_size, 16, maximum=_MAX_SIZE),
            step_rank=rank,
            conv_length=config.integer(conv_length, 4, minimum=2, maximum=_MAX_SIZE),
            conv_bias=config.boolean(conv_bias, True),
            projection_bias=config.boolean(bias, False),
        )

    @property
    def num_parts(self) -> int:
        """Equal parts of the channels, which ranks share."""
        return math.gcd(self.inner_size, _MOST_PARTS)

    @property
    def part_size(self) -> int:
        """Numbers of a part's state: columns of its channels, and a row of N numbers for each."""
        return self.inner_size // self.num_parts * (self.conv_length - 1 + self.state_size)

    def shared_sizes(self, field: str) -> dict[str, int]:
        """What ranks share, by the field of config.json that says how many channels there are."""
        return {
            f"{field} in parts of {self.inner_size // self.num_parts} of {self.inner_size} channels": self.num_parts
        }
