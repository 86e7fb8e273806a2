"""Mixtures of experts against the sum that they stand for, one token and expert at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels import experts as module
from pdserve.kernels.experts import GroupedExperts, LoopedExperts, make_experts, route_top_k
from tests.support.pretend_device import pretended_device

E, H, I = 6, 16, 24  # noqa: E741
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def weights_of(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    gate_up = [torch.randn(2 * I, H, generator=generator).mul(0.3).to(dtype) for _ in range(E)]
    return gate_up, [torch.randn(H, I, generator=generator).mul(0.3).to(dtype) for _ in range(E)]


def tokens_of(num_tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, H, generator=generator).to(dtype)
    weights, experts = route_top_k(torch.randn(num_tokens, E, generator=generator).to(dtype), top_k, normalise=True)
    return x, weights, experts


def expected(x: Tensor, weights: Tensor, experts: Tensor, gate_up: list[Tensor], down: list[Tensor]) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            out[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
def test_the_weighted_sum(kind: Any, num_tokens: int, top_k: int, dtype: torch.dtype) -> None:
    gate_up, down = weights_of(dtype)
    x, weights, experts = tokens_of(num_tokens, top_k, dtype)
    before = x.clone()
    found = kind(gate_up, down)(x, weights, experts)
    assert found.dtype is dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        found.double(), expected(x, weights, experts, gate_up, down), atol=tolerance, rtol=tolerance
    )
    assert torch.equal(x, before)


def test_only_experts_with_tokens_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost follows the routed tokens: each is computed by its own experts alone."""
    rows: list[tuple[int, int]] = []

    def counted(weight: Tensor) -> Any:
        return lambda x: rows.append((weight.shape[0], len(x))) or F.linear(x, weight)

    monkeypatch.setattr(module, "make_linear", counted)
    gate_up, down = weights_of(torch.float32)
    layer = LoopedExperts(gate_up, down)
    x = torch.randn(5, H)
    layer(x, torch.ones(5, 2), torch.tensor([[0, 4], [4, 0], [4, 2], [0, 4], [4, 0]]))
    assert rows == [(2 * I, 4), (H, 4), (2 * I, 1), (H, 1), (2 * I, 5), (H, 5)]


@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
def test_a_tokens_result_does_not_depend_on_the_order_of_the_batch(kind: Any) -> None:
    gate_up, down = weights_of(torch.float32)
    layer = kind(gate_up, down)
    x, weights, experts = tokens_of(33, 3, torch.float32)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        layer(x[order], weights[order], experts[order]), layer(x, weights, experts)[order], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_routing(dtype: torch.dtype, normalise: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [5.0, 5.0, -3.0, 5.5]], dtype=dtype)
    weights, experts = route_top_k(logits, 2, normalise=normalise)
    assert weights.dtype is dtype
    assert experts.tolist()[0] == [1, 2]
    assert experts.tolist()[1][0] == 3
    exact = logits.double().softmax(-1).gather(1, experts)
    if normalise:
        exact = exact / exact.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), exact, atol=1e-6 if dtype is torch.float32 else 4e-3, rtol=0)


def test_the_device_decides() -> None:
    with pretended_device() as device:
        gate_up, down = ([weight.to(device) for weight in kind] for kind in weights_of(torch.float32))
        assert isinstance(make_experts(gate_up, down), GroupedExperts)
    assert isinstance(make_experts(*weights_of(torch.float32)), LoopedExperts)
    with pytest.raises(ValueError, match="6 and 0 expert weights"):
        make_experts(weights_of(torch.float32)[0], [])
