"""`DistanceBuckets`: T5's positions, a number per head and bucket of distances that is added to the scores.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.1.
Half of the buckets are one distance each, the others grow logarithmically up to a largest distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DistanceBuckets:
    """How distances are divided."""

    num_buckets: int
    """At least 4, even."""
    max_distance: int
    """All distances from here on share the last bucket. Above half of the buckets."""

    def causal_table(self, weight: Tensor) -> Tensor:
        """The bias of keys before the query, see `AttentionPlan.attend`: weight `[num_buckets, Hq]` -> `[Hq, max_distance + 1]`."""
        distances = torch.arange(self.max_distance + 1, device=weight.device)
        return weight[_buckets(distances, self.num_buckets, self.max_distance)].t().contiguous()

    def table(self, weight: Tensor, num_tokens: int) -> Tensor:
        """The bias between all tokens of a prompt: weight `[num_buckets, Hq]` -> `[Hq, n, n]`, queries before keys.

        Half of the buckets are for keys after the query.
        """
        places = torch.arange(num_tokens, device=weight.device)
        behind = places - places.unsqueeze(1)
        half = self.num_buckets // 2
        buckets = _buckets(behind.abs(), half, self.max_distance) + half * (behind > 0)
        return weight[buckets].permute(2, 0, 1).contiguous()


def _buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """distances `[*]` int64, at least 0 -> buckets `[*]` int64."""
    num_exact = num_buckets // 2
    # float32, as in transformers: another rounding would move a border
    share = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    grown = num_exact + (share.clamp(min=0) * (num_buckets - num_exact)).long()
    return torch.where(distances < num_exact, distances, grown.clamp(max=num_buckets - 1))
