"""Convolutions along sequences, each channel by itself, whose state is the last columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.state.step_rows import StepRows


@dataclass(frozen=True, slots=True, eq=False)
class ColumnPart:
    """Channels next to each other; each head of a state keeps as many columns of them."""

    num_channels: int
    """Of a head."""
    groups: Tensor | None = None
    """`[H]` int64: the heads of one group have the same channels, and each keeps their columns; None: each head has its own."""
    firsts: Tensor | None = None
    """`[groups]` int64: the first head of each."""


@dataclass(frozen=True, slots=True, eq=False)
class CausalConv:
    """A convolution, and where heads keep its columns: at the beginning of their states, part by part, `[channels, K - 1]` each."""

    weight: Tensor
    """`[C, K]`"""
    bias: Tensor | None
    """`[C]`"""
    parts: Sequence[ColumnPart]
    """The C channels in their order: those of all heads, or groups, of the first part, then of the next."""
    has_silu: bool = False
    """The results are activated."""

    @property
    def num_kept(self) -> int:
        """Numbers of a head's state."""
        return sum(part.num_channels for part in self.parts) * (self.weight.shape[1] - 1)

    def apply(self, columns: Tensor, kept: Tensor, rows: StepRows) -> tuple[Tensor, Tensor]:
        """columns `[T, C]`, kept `[B, H, num_kept]` before the step -> results `[T, C]`, and what is kept after it."""
        made, after = causal_conv(columns, self._columns(kept), self.weight, self.bias, rows)
        return F.silu(made) if self.has_silu else made, self._kept(after, kept.shape[1])

    def _columns(self, kept: Tensor) -> Tensor:
        """`[B, H, num_kept]` -> `[B, C, K - 1]`"""
        size, found = self.weight.shape[1] - 1, []
        for part, own in zip(
            self.parts, torch.split(kept, [part.num_channels * size for part in self.parts], -1), strict=True
        ):
            own = own if part.firsts is None else own.index_select(1, part.firsts)
            found.append(own.reshape(len(kept), -1, size))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _kept(self, columns: Tensor, num_heads: int) -> Tensor:
        """The reverse."""
        sizes = [part.num_channels * (num_heads if part.firsts is None else len(part.firsts)) for part in self.parts]
        found = []
        for part, own in zip(self.parts, torch.split(columns, sizes, 1), strict=True):
            of_groups = own.reshape(len(columns), own.shape[1] // part.num_channels, -1)
            found.append(of_groups if part.groups is None else of_groups.index_select(1, part.groups))
        return found[0] if len(found) == 1 else torch.cat(found, -1)


def causal_conv(
    columns: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, plan: StepRows
) -> tuple[Tensor, Tensor]:
    """`y_t = sum_k w_k x_(t - K + 1 + k) + bias` for the tokens of a step.

    columns `[T, C]`, before: the K - 1 columns before each sequence's first `[B, C, K - 1]`, weight `[C, K]`, bias `[C]` -> y
    `[T, C]` and the last columns of each sequence, in the dtype of `before`.
    """
    made, after, num = torch.empty_like(columns), torch.empty_like(before), plan.num_decodes
    kernel = weight.unsqueeze(1)
    if num:
        rows = torch.cat((before[:num].to(columns.dtype), columns[:num].unsqueeze(2)), 2)
        made[:num] = F.conv1d(rows, kernel, bias, groups=len(weight)).squeeze(2)
        after[:num] = rows[:, :, 1:]
    for place, (first, stop) in enumerate(plan.chunks, num):
        row = torch.cat((before[place].to(columns.dtype), columns[first:stop].t()), 1)
        made[first:stop] = F.conv1d(row.unsqueeze(0), kernel, bias, groups=len(weight))[0].t()
        after[place] = row[:, stop - first :]
    return made, after
