"""Experts without weights, next to others, against their definition token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import Experts, GroupedExperts, LoopedExperts, make_experts
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.layers.experts_with_identity import ExpertsWithIdentity

NUM_EXPERTS, NUM_IDENTITY, SIZE, INNER, TOP_K = 5, 4, 16, 24, 3


def _weights() -> list[ExpertWeights]:
    torch.manual_seed(0)
    return [ExpertWeights(torch.randn(2 * INNER, SIZE), torch.randn(SIZE, INNER)) for _ in range(NUM_EXPERTS)]


def _expected(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    experts, rows = _weights(), []
    for token, its_weights, its_experts in zip(x, weights, chosen, strict=True):
        terms = []
        for weight, expert in zip(its_weights, its_experts.tolist(), strict=True):
            if expert < NUM_EXPERTS:
                gate, up = (experts[expert].gate_up @ token).chunk(2)
                terms.append(weight * (experts[expert].down @ (F.silu(gate) * up)))
            else:
                terms.append(weight * token)
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts, make_experts])
def test_equal_to_the_definition(kind: type[LoopedExperts]) -> None:
    inner: Experts = kind(_weights())
    torch.manual_seed(1)
    x, weights = torch.randn(20, SIZE), torch.rand(20, TOP_K)
    chosen = torch.stack([torch.randperm(NUM_EXPERTS + NUM_IDENTITY)[:TOP_K] for _ in range(18)])
    # only experts without weights, and none of them
    chosen = torch.cat((chosen, torch.tensor([[5, 8, 6], [4, 0, 2]])))
    ops = TorchLayerOps()
    ranks = [ExpertsWithIdentity(inner, NUM_EXPERTS, is_first_rank=is_first) for is_first in (True, False)]
    first, other = (rank(x, weights, chosen, ops) for rank in ranks)
    expected = _expected(x, weights, chosen)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)
    is_identity = chosen >= NUM_EXPERTS
    shares = (weights * is_identity).sum(1, keepdim=True)
    torch.testing.assert_close(other, expected - shares * x, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other[18], torch.zeros(SIZE))
