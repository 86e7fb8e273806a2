"""What a delta net computes of its hidden states: `HeadInputs` in one product per part, `LowRankInputs` with gates of low rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.cpu.matrices import with_rows
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader


class Mixed(NamedTuple):
    """Of T tokens, of this rank's heads."""

    columns: Tensor
    """`[T, C]`: the convolution's channels, per key head its query, key and values."""
    gate: Tensor
    """`[T, Hv * Dv]`"""
    beta: Tensor
    """`[T, Hv]`: its sigmoid is the strength of a value."""
    step: Tensor
    """`[T, Hv, 1]`, or `[T, Hv, Dk]` with a decay per channel."""


class DeltaInputs(Protocol):
    def __call__(self, x: Tensor) -> Mixed:
        """x `[T, H]`"""
        ...


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """Qwen3-Next's."""

    qkvz: Linear
    """Hidden state -> per key head its query, key, values and gates."""
    ba: Linear
    """Hidden state -> per key head the strengths and the steps of its values."""
    num_heads: int
    """Key heads."""
    num_channels: int
    """Of the convolution, per key head."""

    def __call__(self, x: Tensor) -> Mixed:
        qkvz = self.qkvz(x).view(len(x), self.num_heads, -1)
        beta, step = self.ba(x).view(len(x), self.num_heads, 2, -1).unbind(2)
        return Mixed(
            qkvz[..., : self.num_channels].flatten(1), qkvz[..., self.num_channels :].flatten(1), beta.flatten(1),
            step.flatten(1).unsqueeze(-1),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LowRankInputs:
    """Kimi Linear's: gates and steps go through as many numbers as a head has."""

    inputs: Linear
    """Hidden state -> per head its query, key and value; then the numbers for steps and for gates, and the strengths."""
    step: Linear
    """`[T, D]` -> `[T, Hv * Dk]`"""
    gate: Linear
    """`[T, D]` -> `[T, Hv * Dv]`"""
    num_heads: int
    head_dim: int

    def __call__(self, x: Tensor) -> Mixed:
        heads, size = self.num_heads, self.head_dim
        columns, step, gate, beta = torch.split(self.inputs(x), [3 * heads * size, size, size, heads], -1)
        return Mixed(columns, self.gate(gate), beta, self.step(step).view(len(x), heads, size))

    @classmethod
    def load(cls, weights: WeightLoader, prefix: str, num_heads: int, head_dim: int, hidden_size: int) -> LowRankInputs:
        """Read `{prefix}.q_proj`, `k_proj`, `v_proj`, `b_proj`, and `a` and `b` of `{prefix}.f_*_proj` and `g_*_proj`.

        num_heads: of all ranks; each has its part, and all of what the gates and steps go through. Raises: ConfigError.
        """
        own = weights.shard.heads(num_heads)
        rows = num_heads * head_dim
        part = None if len(own) == num_heads else rows_of(own, head_dim)
        narrow = [f"{prefix}.{name}_a_proj" for name in "fg"]
        names = [*(f"{prefix}.{name}_proj" for name in "qkv"), *narrow, f"{prefix}.b_proj"]
        heads = weights.stack([weights.matrix(name, rows, hidden_size, part) for name in names[:3]], names[:3])
        sizes = [len(own) * head_dim] * 3
        matrices = [
            with_rows(heads, partial(by_head, sizes=sizes, num_heads=len(own))),
            *(weights.matrix(name, head_dim, hidden_size) for name in narrow),
            weights.matrix(names[-1], num_heads, hidden_size, None if part is None else rows_of(own, 1)),
        ]
        step, gate = (make_linear(weights.matrix(f"{prefix}.{name}_b_proj", rows, head_dim, part)) for name in "fg")
        return cls(make_linear(weights.stack(matrices, names)), step, gate, len(own), head_dim)


def read_by_head(
    weights: WeightLoader, prefix: str, parts: Mapping[str, Sequence[int]], heads: int, hidden_size: int
) -> Linear:
    """This rank's rows of some matrices, per key head those of each part. parts: name -> rows of a head in each part of it.

    heads: of all ranks. Raises: ConfigError.
    """
    own, matrices, sizes = weights.shard.heads(heads), [], []
    for name, its_sizes in parts.items():
        first, rows = 0, heads * sum(its_sizes)
        for size in its_sizes:
            part = None if len(own) * size == rows else rows_of(own, size, first)
            matrices.append(weights.matrix(f"{prefix}.{name}", rows, hidden_size, part))
            sizes.append(len(own) * size)
            first += heads * size
    stacked = weights.stack(matrices, [f"{prefix}.{name}" for name in parts])
    return make_linear(with_rows(stacked, partial(by_head, sizes=sizes, num_heads=len(own))))


def rows_of(heads: range, size: int, first: int = 0) -> Part:
    """Rows of some heads of `size` rows, where those of all heads begin at `first`."""
    return Part(0, first + heads.start * size, first + heads.stop * size)


def by_head(rows: Tensor, *, sizes: Sequence[int], num_heads: int) -> Tensor:
    """Parts of `sizes` rows, each head by head -> head by head, each with its rows of all parts; `[R, ...]`."""
    heads = [part.view(num_heads, -1, *rows.shape[1:]) for part in torch.split(rows, list(sizes))]
    return torch.cat(heads, 1).flatten(0, 1)
