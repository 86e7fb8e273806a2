"""Experts that a checkpoint stores in one tensor per projection: gpt-oss, Qwen3-VL-MoE, Llama 4."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import Experts, make_experts
from pdserve.kernels.layers.gated_activations import ClampedSwiglu, Gate
from pdserve.models.layers.mlp import GATES
from pdserve.models.layers.routing import Router, TopKRouter
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader


def load_stacked_experts(
    weights: WeightLoader,
    prefix: str,
    hidden_size: int,
    inner_size: int,
    *,
    num_experts: int,
    top_k: int,
    router: str,
    gate: ClampedSwiglu | None = None,
    in_turn: bool = False,
    bias: bool = False,
    projections: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
) -> SparseMlp:
    """Read `{prefix}.{router}` and the experts. bias: of both. Others: as of `stacked_experts`. Raises: ConfigError."""
    router_weight = weights.tensor(f"{prefix}.{router}.weight", num_experts, hidden_size)
    route = make_linear(router_weight, weights.tensor(f"{prefix}.{router}.bias", num_experts) if bias else None)
    experts = stacked_experts(
        weights, prefix, hidden_size, inner_size, num_experts=num_experts, gate=gate, in_turn=in_turn, bias=bias,
        projections=projections,
    )  # fmt: skip
    return SparseMlp(TopKRouter(route, top_k, True), experts, weights.shard.group)


def stacked_or_single_experts(
    weights: WeightLoader,
    prefix: str,
    hidden_size: int,
    inner_size: int,
    *,
    num_experts: int,
    router: Router,
    activation: str = "silu",
    outputs_first: bool = False,
) -> Experts:
    """Read stacked experts, or matrices of each, as tools that quantize them write them. Arguments: as of `stacked_experts` and
    `SparseMlp.load`. Raises: ConfigError."""
    if weights.shape(f"{prefix}.experts.0.gate_proj.weight") is None:
        return stacked_experts(
            weights, prefix, hidden_size, inner_size, num_experts=num_experts, gate=GATES[activation],
            outputs_first=outputs_first,
        )  # fmt: skip
    return SparseMlp.load(
        weights, prefix, hidden_size, inner_size, num_experts=num_experts, router=router, activation=activation
    ).experts


def stacked_experts(
    weights: WeightLoader,
    prefix: str,
    hidden_size: int,
    inner_size: int,
    *,
    num_experts: int,
    gate: Gate | None = None,
    in_turn: bool = False,
    bias: bool = False,
    projections: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj"),
    outputs_first: bool = False,
) -> Experts:
    """Read the two matrices of the experts, by their names in `projections`.

    gate: the activation; None: SwiGLU. in_turn: outputs are gate 0, up 0, gate 1, ...; False: all of gate, then all of up. bias: of
    the experts. outputs_first: all matrices are `[E, out, in]`; False: of either form. Raises: ConfigError.
    """
    shard = weights.shard
    inner = shard.part(0, inner_size) or Part(0, 0, inner_size)
    gate_up = _matrices(weights, f"{prefix}.{projections[0]}", num_experts, 2 * inner_size, hidden_size, outputs_first)
    down = _matrices(weights, f"{prefix}.{projections[1]}", num_experts, hidden_size, inner_size, outputs_first)
    gate_up_bias, down_bias = None, None
    if bias:
        gate_up_bias = weights.tensor(f"{prefix}.experts.gate_up_proj_bias", num_experts, 2 * inner_size)
        down_bias = weights.tensor(f"{prefix}.experts.down_proj_bias", num_experts, hidden_size)
        if shard.rank:
            # the ranks' results are added up, and each has the bias
            down_bias = torch.zeros_like(down_bias)

    def own(outputs: Tensor) -> Tensor:
        """This rank's gate and up, one after the other, of `[2 * I, ...]`."""
        halves = (outputs[::2], outputs[1::2]) if in_turn else outputs.chunk(2)
        return torch.cat([half[inner.start : inner.stop] for half in halves])

    def experts() -> Iterator[ExpertWeights]:
        for expert in range(num_experts):
            yield ExpertWeights(
                own(gate_up[expert]),
                down[expert][:, inner.start : inner.stop].contiguous(),
                None if gate_up_bias is None else own(gate_up_bias[expert]),
                None if down_bias is None else down_bias[expert].clone(),
            )

    return make_experts(experts(), gate)


def _matrices(
    weights: WeightLoader, name: str, num_experts: int, rows: int, columns: int, outputs_first: bool
) -> Tensor:
    """`[E, out, in]`. Published checkpoints have `[E, in, out]`; transformers 5 writes some families the other way round."""
    if outputs_first or (rows != columns and weights.shape(name) == (num_experts, rows, columns)):
        return weights.tensor(name, num_experts, rows, columns)
    return weights.tensor(name, num_experts, columns, rows).mT
