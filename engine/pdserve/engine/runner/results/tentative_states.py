"""`TentativeStates`: the states of a step's sequences whose tokens may turn out not to stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pdserve.engine.arrays import IntArray
from pdserve.kernels.layer_plans import LayerPlan
from pdserve.kernels.state.state_backend import StatePlan


@dataclass(frozen=True, slots=True)
class TentativeStates:
    """Of one step, between its launch and its result."""

    plans: Sequence[StatePlan]
    rows: IntArray
    """`[S]`, rows of the batch."""
    num_before: IntArray
    """`[S]`: computed tokens of each row before the step."""

    @classmethod
    def of(cls, plans: Iterable[LayerPlan], rows: IntArray, num_before: IntArray) -> TentativeStates:
        """plans: of all layers of the step."""
        return cls([plan for plan in plans if isinstance(plan, StatePlan)], rows, num_before)

    @torch.inference_mode()
    def advance(self, num_computed: IntArray) -> None:
        """Write the states of what stands. num_computed `[num_rows]`: computed tokens of each row of the batch."""
        num_tokens: list[int] = (num_computed[self.rows] - self.num_before).tolist()
        for plan in self.plans:
            plan.advance(num_tokens)
