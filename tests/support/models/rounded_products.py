"""`rounded_products`: transformers' linear layers with weights and inputs rounded to eight bits, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def rounded_products(model: nn.Module, *, weights: bool = True) -> Iterator[None]:
    """Products round each row of their input to 255 steps, and each row of the weight with `weights`; not those of the output head
    and of routers of experts."""
    exact = F.linear
    exempt = {
        weight.data_ptr()
        for name, weight in model.named_parameters()
        if name == "lm_head.weight" or name.endswith("mlp.gate.weight")
    }

    def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() in exempt:
            return exact(x, weight, bias)
        y = exact(_rounded(x), _rounded(weight) if weights else weight.double()).to(x.dtype)
        return y if bias is None else y + bias

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", rounded)
        yield


def _rounded(rows: Tensor) -> Tensor:
    steps = rows.double().abs().amax(-1, keepdim=True) / 127
    return (rows / steps).round() * steps
