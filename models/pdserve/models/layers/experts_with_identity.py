"""`ExpertsWithIdentity`: experts, and others without weights that return their input."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.experts import Experts


class ExpertsWithIdentity:
    """Implements `Experts`; those from `num_experts` on return their input, so that a token costs fewer experts than it has."""

    def __init__(self, experts: Experts, num_experts: int, *, is_first_rank: bool) -> None:
        """experts: E of them, num_experts E. is_first_rank: False: another rank adds the inputs to the sum over all ranks."""
        self._experts = experts
        self._num_experts = num_experts
        self._is_first_rank = is_first_rank

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, ops: LayerOps) -> Tensor:
        is_identity = experts >= self._num_experts
        # shapes may not depend on the choice: a place without an expert computes one that the token has anyway, with weight 0
        some = experts.masked_fill(is_identity, 0).amax(-1, keepdim=True)
        computed = self._experts(x, weights.masked_fill(is_identity, 0), torch.where(is_identity, some, experts), ops)
        if not self._is_first_rank:
            return computed
        shares = weights.masked_fill(~is_identity, 0).sum(-1, keepdim=True, dtype=torch.float32)
        return computed.add_((x * shares).to(x.dtype))
