"""`ExpertsOfScaledInputs`: experts whose inputs are multiplied by routing weights, and not their outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.experts import Experts


@dataclass(frozen=True, slots=True)
class ExpertsOfScaledInputs:
    """Implements `Experts`. A token is k inputs, one for each of its experts."""

    experts: Experts

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, ops: LayerOps) -> Tensor:
        inputs = (x.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)
        found = self.experts(inputs, torch.ones_like(weights).view(-1, 1), experts.reshape(-1, 1), ops)
        return found if weights.shape[1] == 1 else found.view(*weights.shape, -1).sum(1)
