"""Mixtures of experts against the sum that they stand for, one token and expert at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import swiglu
from pdserve.kernels.layers import experts as module
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import GroupedExperts, LoopedExperts, make_experts, route_top_k
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from tests.kernels.grouped_experts_contract import GroupedExpertsContract
from tests.support.engine.pretend_device import pretended_device

OPS = TorchLayerOps()
E, H, I = 6, 16, 24  # noqa: E741
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def weights_of(dtype: torch.dtype) -> list[ExpertWeights]:
    return [ExpertWeights(gate_up, down) for gate_up, down in matrices_of(dtype)]


def matrices_of(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul(0.3).to(dtype)

    return [(drawn(2 * I, H), drawn(H, I)) for _ in range(E)]


def tokens_of(num_tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, H, generator=generator).to(dtype)
    weights, experts = route_top_k(torch.randn(num_tokens, E, generator=generator).to(dtype), top_k, normalise=True)
    return x, weights, experts


def expected(x: Tensor, weights: Tensor, experts: Tensor, layer: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate_up, down = layer[expert]
            gate, up = (gate_up.double() @ row).chunk(2)
            out[token] += weight * (down.double() @ (F.silu(gate) * up))
    return out


@pytest.mark.diagonal(3)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
@pytest.mark.parametrize("top_k", [1, 3, E])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
def test_the_weighted_sum(kind: Any, num_tokens: int, top_k: int, dtype: torch.dtype) -> None:
    layer = weights_of(dtype)
    matrices = matrices_of(dtype)
    x, weights, experts = tokens_of(num_tokens, top_k, dtype)
    before = x.clone()
    found = kind(layer)(x, weights, experts, OPS)
    assert found.dtype is dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected(x, weights, experts, matrices), atol=tolerance, rtol=tolerance)
    assert torch.equal(x, before)


def test_only_experts_with_tokens_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost follows the routed tokens: each is computed by its own experts alone."""
    rows: list[tuple[int, int]] = []

    def counted(weight: Tensor, bias: Tensor | None) -> Any:
        def linear(x: Tensor) -> Tensor:
            rows.append((weight.shape[0], len(x)))
            return F.linear(x, weight)

        return linear

    monkeypatch.setattr(module, "make_linear", counted)
    layer = LoopedExperts(weights_of(torch.float32))
    x = torch.randn(5, H)
    layer(x, torch.ones(5, 2), torch.tensor([[0, 4], [4, 0], [4, 2], [0, 4], [4, 0]]), OPS)
    assert rows == [(2 * I, 4), (2 * I, 1), (2 * I, 5), (H, 4), (H, 1), (H, 5)]


@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
def test_a_tokens_result_does_not_depend_on_the_order_of_the_batch(kind: Any) -> None:
    layer = kind(weights_of(torch.float32))
    x, weights, experts = tokens_of(33, 3, torch.float32)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        layer(x[order], weights[order], experts[order], OPS),
        layer(x, weights, experts, OPS)[order],
        atol=1e-6,
        rtol=0,
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
        there = [ExpertWeights(*(matrix.to(device) for matrix in pair)) for pair in matrices_of(torch.float32)]
        assert isinstance(make_experts(there), GroupedExperts)
    assert not isinstance(make_experts(weights_of(torch.float32)), GroupedExperts)
    with pytest.raises(ValueError, match="at least one expert"):
        make_experts([])


def test_on_a_processor_an_expert_is_packed_before_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a layer of many experts is held twice."""
    events: list[str] = []
    monkeypatch.setattr(module, "make_linear", lambda weight, bias: events.append("packed"))

    def read() -> Iterator[ExpertWeights]:
        for weights in weights_of(torch.float32)[:2]:
            events.append("read")
            yield weights

    LoopedExperts(read())
    assert events == ["read", "packed", "packed"] * 2


@pytest.mark.parametrize("kind", [LoopedExperts, GroupedExperts])
def test_biases_of_experts(kind: Any) -> None:
    """Each product of an expert has its own."""
    biases = [(torch.randn(2 * I), torch.randn(H)) for _ in range(E)]
    with_biases = [ExpertWeights(*pair, *own) for pair, own in zip(matrices_of(torch.float32), biases, strict=True)]
    x, weights, experts = tokens_of(9, 2, torch.float32)
    found = kind(with_biases)(x, weights, experts, OPS)
    exact = torch.zeros_like(found)
    for token in range(9):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            (gate_up, down), (inner_bias, bias) = matrices_of(torch.float32)[expert], biases[expert]
            exact[token] += weight * (down @ swiglu((gate_up @ x[token] + inner_bias).unsqueeze(0))[0] + bias)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


class TestGroupedProducts(GroupedExpertsContract):
    def make_ops(self) -> TorchLayerOps:
        return TorchLayerOps()
