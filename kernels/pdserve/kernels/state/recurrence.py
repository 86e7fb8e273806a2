"""`Recurrence`: how a step's sequences go through a rule that changes their states token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.state.step_rows import StepRows

Rule = Callable[..., tuple[Tensor, Tensor]]
"""Tensors of tokens and a state -> results of the tokens and the state after them."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """All tensors are float32."""

    step: Rule
    """One token of each of B sequences: tensors and states `[B, ...]`."""
    chunk: Rule
    """One or more tokens of one sequence at once: tensors `[n, ...]` and its state."""
    chunk_size: int
    """The largest n."""
    like: int
    """Index of the tensor of tokens whose shape the results have."""

    def in_chunks(self, tokens: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of one sequence `[n, ...]`: results `[n, ...]`, and the state after the last."""
        found = torch.empty_like(tokens[self.like])
        for start in range(0, len(found), self.chunk_size):
            part = slice(start, start + self.chunk_size)
            found[part], state = self.chunk(*(each[part] for each in tokens), state)
        return found, state

    def over_step(self, tokens: Sequence[Tensor], states: Tensor, plan: StepRows) -> tuple[Tensor, Tensor]:
        """Those of a step, `[T, ...]` and states `[B, ...]`: results `[T, ...]`, and the states after it."""
        found, after, num = torch.empty_like(tokens[self.like]), torch.empty_like(states), plan.num_decodes
        if num:
            found[:num], after[:num] = self.step(*(each[:num] for each in tokens), states[:num])
        for place, (first, stop) in enumerate(plan.chunks, num):
            own = slice(first, stop)
            found[own], after[place] = self.in_chunks([each[own] for each in tokens], states[place])
        return found, after
