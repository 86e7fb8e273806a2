"""Mixture of experts: the router chooses `k` experts per token."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.cpu.int8_linear import Int8Matrix, has_amx
from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.expert_stack import ExpertStack, by_expert, by_token
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.gated_activations import Gate, GatedActivation
from pdserve.kernels.native.native_experts import NativeExperts
from pdserve.kernels.native.native_library import NATIVE_DTYPES, built_library


def route_top_k(router_logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts with the highest softmax probability, and their weights.

    router_logits `[T, E]`, normalise: the weights of a token add up to 1 -> weights `[T, k]` in the dtype of the logits,
    experts `[T, k]` int64. Softmax and normalisation are computed in float32.
    """
    weights, experts = router_logits.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    if normalise:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def route_in_groups(
    router_logits: Tensor, top_k: int, *, num_groups: int, kept_groups: int, bias: Tensor | None, normalise: bool
) -> tuple[Tensor, Tensor]:
    """The `top_k` best experts of the `kept_groups` best groups of experts, and their weights in float32.

    router_logits `[T, E]` float32. Without a bias scores are softmax probabilities, and a group's is that of its best expert. With
    a bias `[E]` they are sigmoids; it is added to choose experts, and not to their weights, and a group's score is the sum of its
    two best. normalise: the weights of a token add up to 1. Source: DeepSeek V2 and V3.
    """
    scores = router_logits.softmax(-1) if bias is None else router_logits.sigmoid()
    chosen_by = scores if bias is None else scores + bias
    if kept_groups < num_groups:
        groups = chosen_by.view(len(scores), num_groups, -1)
        of_groups = groups.amax(-1) if bias is None else groups.topk(2, -1).values.sum(-1)
        is_kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(
            1, of_groups.topk(kept_groups, -1).indices, True
        )
        hidden = 0.0 if bias is None else -torch.inf
        chosen_by = groups.masked_fill(~is_kept.unsqueeze(-1), hidden).flatten(1)
    experts = chosen_by.topk(top_k, -1).indices
    weights = (chosen_by if bias is None else scores).gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, experts


class Experts(Protocol):
    """E gated MLPs: `down_e(act(gate_e x) * up_e x)`."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, ops: LayerOps) -> Tensor:
        """Sum over a token's k experts of weight times the expert's output.

        x `[T, H]`, weights and experts `[T, k]` -> `[T, H]`. The order in which a token's terms are added does not depend on other
        tokens.
        """
        ...


class LoopedExperts:
    """Two products per expert that has tokens; other experts cost nothing. Reads the token counts back from the device."""

    def __init__(self, experts: Iterable[ExpertWeights], gate: Gate | None = None) -> None:
        """gate: the activation; None: SiLU."""
        self._experts = [
            (make_linear(each.gate_up, each.gate_up_bias), make_linear(each.down, each.down_bias)) for each in experts
        ]
        self._gate = gate

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, ops: LayerOps) -> Tensor:
        order, counts = by_expert(experts, len(self._experts))
        rows = x.index_select(0, order // experts.shape[1])
        used = [(expert, count) for expert, count in zip(self._experts, counts.tolist(), strict=True) if count]
        if not used:
            return torch.zeros_like(x)
        sizes = [count for _, count in used]
        parts = zip(used, rows.split_with_sizes(sizes), strict=True)
        # each expert has only a few rows, so work that can be done once for all experts is not repeated per expert
        gate_up = torch.cat([gate_up(part) for ((gate_up, _), _), part in parts])
        inner = (self._gate or ops.swiglu)(gate_up).contiguous()
        parts = zip(used, inner.split_with_sizes(sizes), strict=True)
        return by_token(torch.cat([down(part) for ((_, down), _), part in parts]), order, weights)


class GroupedExperts:
    """All experts in one operation of `LayerOps`. Reads nothing back from the device."""

    def __init__(self, experts: Iterable[ExpertWeights], gate: Gate | None = None) -> None:
        """gate: the activation; None: SiLU."""
        self._stack = ExpertStack.of(experts, gate)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, ops: LayerOps) -> Tensor:
        return ops.grouped_experts(x, weights, experts, self._stack)


def make_experts(experts: Iterable[ExpertWeights], gate: Gate | None = None) -> Experts:
    """The fastest layer for these weights. On a CPU, at most one expert is in memory twice while the layer is built.

    gate: the activation; None: SiLU. Raises: ValueError for an empty list; TypeError for experts that are quantized in different
    ways, where the layer multiplies all in one.
    """
    remaining = iter(experts)
    first = next(remaining, None)
    if first is None:
        raise ValueError("a mixture needs at least one expert")
    every = chain([first], remaining)
    is_int8 = isinstance(first.gate_up, Int8Matrix)
    values = first.gate_up if isinstance(first.gate_up, Tensor) else first.gate_up.values
    if not values.is_cpu:
        return LoopedExperts(every, gate) if is_int8 else GroupedExperts(every, gate)
    library, activation = built_library(), GatedActivation.of(gate)
    is_native = is_int8 or values.dtype in NATIVE_DTYPES
    # oneDNN uses AMX, but the C++ kernels do not
    if library is None or activation is None or has_amx() or not is_native:
        return LoopedExperts(every, gate)
    return NativeExperts(every, activation, library)
