"""Mixture of experts: the router chooses `k` experts per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.int8_linear import Int8Matrix, Matrix, tensors
from pdserve.kernels.linear import make_linear

Swiglu = Callable[[Tensor], Tensor]


class ExpertWeights(NamedTuple):
    """Weights of one expert. All experts of a layer have biases, or none."""

    gate_up: Matrix
    """Gate and up side by side `[2 * I, H]`."""
    down: Matrix
    """`[H, I]`"""
    gate_up_bias: Tensor | None = None
    """`[2 * I]`"""
    down_bias: Tensor | None = None
    """`[H]`"""


def route_top_k(router_logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts with the highest softmax probability, and their weights.

    router_logits `[T, E]`, normalise: the weights of a token add up to 1 -> weights `[T, k]` in the dtype of the logits,
    experts `[T, k]` int64. Softmax and normalisation are computed in float32.
    """
    weights, experts = router_logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    if normalise:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


class Experts(Protocol):
    """E gated MLPs: `down_e(silu(gate_e x) * up_e x)`."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, swiglu: Swiglu) -> Tensor:
        """Sum over a token's k experts of weight times the expert's output.

        x `[T, H]`, weights and experts `[T, k]`, swiglu: `LayerOps.swiglu` -> `[T, H]`. Each token's terms are added in the order
        of its `experts` row, so the sum does not depend on other tokens.
        """
        ...


class LoopedExperts:
    """Two products per expert that has a token; other experts cost nothing. Reads the number of tokens per expert on the host."""

    def __init__(self, experts: Iterable[ExpertWeights]) -> None:
        self._experts = [
            (make_linear(each.gate_up, each.gate_up_bias), make_linear(each.down, each.down_bias)) for each in experts
        ]

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, swiglu: Swiglu) -> Tensor:
        order, counts = _by_expert(experts, len(self._experts))
        rows = x.index_select(0, order // experts.shape[1])
        used = [(expert, count) for expert, count in zip(self._experts, counts.tolist(), strict=True) if count]
        if not used:
            return torch.zeros_like(x)
        sizes = [count for _, count in used]
        parts = zip(used, rows.split_with_sizes(sizes), strict=True)
        # a few rows per expert: what is computed once for all of them is not called from here per expert
        inner = swiglu(torch.cat([gate_up(part) for ((gate_up, _), _), part in parts])).contiguous()
        parts = zip(used, inner.split_with_sizes(sizes), strict=True)
        return _by_token(torch.cat([down(part) for ((_, down), _), part in parts]), order, weights)


class GroupedExperts:
    """Two grouped products over all experts. Reads nothing back from the device."""

    def __init__(self, experts: Iterable[ExpertWeights]) -> None:
        gate_up, down, gate_up_biases, down_biases = zip(*experts, strict=True)
        self._gate_up = torch.stack(tensors(gate_up)).transpose(1, 2)
        self._down = torch.stack(tensors(down)).transpose(1, 2)
        self._gate_up_bias, self._down_bias = (
            None if biases[0] is None else torch.stack(biases) for biases in (gate_up_biases, down_biases)
        )

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, swiglu: Swiglu) -> Tensor:
        order, counts = _by_expert(experts, len(self._down))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x.index_select(0, order // experts.shape[1])
        chosen = experts.flatten()[order]
        inner = _add_bias(F.grouped_mm(rows, self._gate_up, offs=ends), self._gate_up_bias, chosen)
        out = F.grouped_mm(swiglu(inner).contiguous(), self._down, offs=ends)
        return _by_token(_add_bias(out, self._down_bias, chosen), order, weights)


def _add_bias(rows: Tensor, biases: Tensor | None, chosen: Tensor) -> Tensor:
    """Rows `[T * k, N]` of the experts `chosen`, with their biases `[E, N]`."""
    return rows if biases is None else rows.add_(biases.index_select(0, chosen))


def _by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Assignments sorted by expert: indices `[T * k]` into `experts.flatten()`, and their number per expert `[E]`."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return flat.argsort(stable=True), counts.scatter_add_(0, flat, torch.ones_like(flat))


def _by_token(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums per token; rows `[T * k, H]` in the given order, weights `[T, k]` -> `[T, H]`."""
    num_tokens, top_k = weights.shape
    sorted_rows = torch.empty_like(rows).index_copy_(0, order, rows)
    return sorted_rows.view(num_tokens, top_k, -1).mul_(weights.unsqueeze(-1)).sum(1)


def make_experts(experts: Iterable[ExpertWeights]) -> Experts:
    """The fastest layer for these weights. On a processor at most one expert is in memory twice meanwhile. Raises: ValueError for
    an empty list."""
    remaining = iter(experts)
    first = next(remaining, None)
    if first is None:
        raise ValueError("a mixture needs at least one expert")
    is_looped = isinstance(first.gate_up, Int8Matrix) or first.gate_up.is_cpu
    kind = LoopedExperts if is_looped else GroupedExperts
    return kind(chain([first], remaining))
