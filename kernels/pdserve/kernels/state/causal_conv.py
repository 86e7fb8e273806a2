"""Convolutions along sequences, each channel by itself, whose state is the last columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.state.state_backend import StatePlan


def causal_conv(
    columns: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None, plan: StatePlan
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
