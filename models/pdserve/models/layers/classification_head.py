"""`ClassificationHead`: one number per label of a hidden state."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Activation = Literal["identity", "sigmoid", "softmax"]


class ClassificationHead:
    """A linear layer without bias, computed in float32 whatever the dtype of the hidden states."""

    def __init__(self, weight: Tensor, activation: Activation) -> None:
        """weight `[C, H]`, C labels, of any float dtype."""
        self._weight = weight.float()
        self._activation = activation

    def forward(self, hidden: Tensor, activated: Tensor) -> Tensor:
        """hidden `[N, H]` -> `[N, C]` float32. activated `[N]` bool: True for rows that get the head's activation."""
        logits = torch.nn.functional.linear(hidden.float(), self._weight)
        match self._activation:
            case "softmax":
                values = logits.softmax(-1)
            case "sigmoid":
                values = logits.sigmoid()
            case "identity":
                values = logits
        return torch.where(activated.unsqueeze(-1), values, logits)
