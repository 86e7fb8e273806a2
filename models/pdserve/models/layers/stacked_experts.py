"""Experts that a checkpoint stores in one tensor per projection, with biases, gate and up in turn: as gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import make_experts
from pdserve.kernels.layers.gated_activations import ClampedSwiglu
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.mxfp4 import BLOCK_SIZE, unpacked
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
    gate: ClampedSwiglu,
    is_packed: bool,
) -> SparseMlp:
    """Read `{prefix}.router` and `{prefix}.experts`. is_packed: the matrices are in MXFP4. Raises: ConfigError."""
    router = make_linear(
        weights.tensor(f"{prefix}.router.weight", num_experts, hidden_size),
        weights.tensor(f"{prefix}.router.bias", num_experts),
    )
    shard = weights.shard
    inner = shard.part(0, inner_size) or Part(0, 0, inner_size)
    own = range(2 * inner.start, 2 * inner.stop)
    sizes = (num_experts, hidden_size, inner_size)
    gate_up = _matrices(
        weights, f"{prefix}.experts.gate_up_proj", (num_experts, 2 * inner_size, hidden_size), is_packed
    )
    down = _matrices(weights, f"{prefix}.experts.down_proj", (num_experts, hidden_size, inner_size), is_packed)
    gate_up_bias = weights.tensor(f"{prefix}.experts.gate_up_proj_bias", num_experts, 2 * inner_size)
    down_bias = weights.tensor(f"{prefix}.experts.down_proj_bias", num_experts, hidden_size)
    if shard.rank:
        # the ranks' results are added up, and each has the bias
        down_bias = torch.zeros_like(down_bias)

    def experts() -> Iterator[ExpertWeights]:
        for expert in range(sizes[0]):
            rows, biases = gate_up[expert][own.start : own.stop], gate_up_bias[expert, own.start : own.stop]
            yield ExpertWeights(
                _side_by_side(rows),
                down[expert][:, inner.start : inner.stop].contiguous(),
                _side_by_side(biases),
                down_bias[expert].clone(),
            )

    return SparseMlp(router, make_experts(experts(), gate), top_k, True, shard.group)


def _side_by_side(rows: Tensor) -> Tensor:
    """Rows gate 0, up 0, gate 1, ... in the order gate 0, gate 1, ..., up 0, ..."""
    return torch.cat((rows[::2], rows[1::2]))


def _matrices(weights: WeightLoader, name: str, shape: tuple[int, int, int], is_packed: bool) -> Tensor:
    """`[E, out, in]`, a view where the checkpoint stores it transposed."""
    num_experts, rows, columns = shape
    if not is_packed:
        return weights.tensor(name, num_experts, columns, rows).transpose(1, 2)
    blocks = weights.packed(f"{name}_blocks", num_experts, rows, columns // BLOCK_SIZE, BLOCK_SIZE // 2)
    scales = weights.packed(f"{name}_scales", num_experts, rows, columns // BLOCK_SIZE)
    return unpacked(blocks, scales, weights.dtype)
