"""`ExpertStack`: all experts of a layer in one tensor per projection, and their weighted sum in torch operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.matrices import Matrix, tensors
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.gated_activations import Gate
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.layers.packed_groups import PackedGroups


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Experts as floats, or in groups."""

    gate_up: Tensor | PackedGroups
    """`[E, 2 * I, H]`"""
    down: Tensor | PackedGroups
    """`[E, H, I]`"""
    gate_up_bias: Tensor | None
    """`[E, 2 * I]`"""
    down_bias: Tensor | None
    """`[E, H]`"""
    gate: Gate | None
    """None: SiLU."""

    @classmethod
    def of(cls, experts: Iterable[ExpertWeights], gate: Gate | None = None) -> ExpertStack:
        """Raises: TypeError for experts that are quantized in other ways, or not all in one way."""
        packed = ((_packed(each.gate_up), _packed(each.down), each.gate_up_bias, each.down_bias) for each in experts)
        gate_up, down, gate_up_biases, down_biases = zip(*packed, strict=True)
        gate_up_bias, down_bias = (
            None if each[0] is None else torch.stack(each) for each in (gate_up_biases, down_biases)
        )
        return cls(_stacked(gate_up), _stacked(down), gate_up_bias, down_bias, gate)

    @property
    def num_experts(self) -> int:
        return len(self.down) if isinstance(self.down, Tensor) else len(self.down.values)

    @property
    def size(self) -> int:
        """H"""
        return self.down.shape[1] if isinstance(self.down, Tensor) else self.down.num_outputs

    @property
    def inner_size(self) -> int:
        """I"""
        return self.down.shape[2] if isinstance(self.down, Tensor) else self.down.num_inputs


def _packed(matrix: Matrix) -> Matrix | PackedGroups:
    """Packed at once, since packed numbers take less memory."""
    return PackedGroups.of(matrix) if isinstance(matrix, GroupedMatrix) else matrix


def _stacked(matrices: Sequence[Matrix | PackedGroups]) -> Tensor | PackedGroups:
    grouped = [matrix for matrix in matrices if isinstance(matrix, PackedGroups)]
    if len(grouped) == len(matrices):
        return PackedGroups.stacked(grouped)
    return torch.stack(tensors(matrices))


def grouped_products(x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack, swiglu: Gate) -> Tensor:
    """Two grouped products over all experts: see `LayerOps.grouped_experts`. swiglu: called for SiLU. Its matrices need rows of a
    multiple of 16 bytes."""
    gate_up, down = (
        each if isinstance(each, Tensor) else each.widened().to(x.dtype) for each in (stack.gate_up, stack.down)
    )
    if isinstance(stack.gate_up, PackedGroups):
        x = stack.gate_up.rounded(x)
    order, counts = by_expert(experts, stack.num_experts)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = x.index_select(0, order // experts.shape[1])
    chosen = experts.flatten()[order]
    inner = _add_bias(F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends), stack.gate_up_bias, chosen)
    inner = (stack.gate or swiglu)(inner).contiguous()
    if isinstance(stack.down, PackedGroups):
        inner = stack.down.rounded(inner)
    out = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return by_token(_add_bias(out, stack.down_bias, chosen), order, weights)


def _add_bias(rows: Tensor, biases: Tensor | None, chosen: Tensor) -> Tensor:
    """Rows `[T * k, N]` of the experts `chosen`, with their biases `[E, N]`."""
    return rows if biases is None else rows.add_(biases.index_select(0, chosen))


def by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Assignments sorted by expert: indices `[T * k]` into `experts.flatten()`, and their number per expert `[E]`."""
    flat = experts.flatten()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return flat.argsort(stable=True), counts.scatter_add_(0, flat, torch.ones_like(flat))


def by_token(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums per token; rows `[T * k, H]` in the given order, weights `[T, k]` -> `[T, H]`."""
    num_tokens, top_k = weights.shape
    sorted_rows = torch.empty_like(rows).index_copy_(0, order, rows)
    return sorted_rows.view(num_tokens, top_k, rows.shape[1]).mul_(weights.unsqueeze(-1)).sum(1)
