"""`ExpertWeights`: the weights of one expert of a mixture."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pdserve.kernels.cpu.matrices import Matrix


class ExpertWeights(NamedTuple):
    """All experts of a layer have biases, or none."""

    gate_up: Matrix
    """Gate and up side by side `[2 * I, H]`; of experts without a gate up `[I, H]`."""
    down: Matrix
    """`[H, I]`"""
    gate_up_bias: Tensor | None = None
    """`[2 * I]`"""
    down_bias: Tensor | None = None
    """`[H]`"""
