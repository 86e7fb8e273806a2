"""`QueryTemperature`: a factor of queries that grows with their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """The factor `1 + scale * log(1 + floor((position + 1) / floor_positions))`, which is 1 at the first positions."""

    floor_positions: int
    scale: float

    def factors(self, positions: Tensor) -> Tensor:
        """`[T]` int64 -> `[T]` float32."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_positions)
        return torch.log1p(steps) * self.scale + 1.0
