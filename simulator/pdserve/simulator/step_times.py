"""`StepTimes`: how long a step of an engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Chunk(NamedTuple):
    """What a step computes of one sequence."""

    num_tokens: int
    """Tokens that it computes."""
    num_before: int
    """Tokens of the sequence that were computed before, and that these attend to."""
    num_outputs: int = 0
    """Tokens that are sampled after it: one at the end of a prompt, one for each sequence that continues the prompt."""


class StepTimes(Protocol):
    """The times of one device, one model and one set of settings."""

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds from one step's schedule to the next, with all that an engine does in between."""


@dataclass(frozen=True, slots=True)
class LinearStepTimes:
    """A time per step, per token, and per token that a computed token attends to."""

    base_s: float
    token_s: float
    context_s: float = 0.0

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        attended = sum(chunk.num_tokens * (chunk.num_before + (chunk.num_tokens + 1) / 2) for chunk in chunks)
        return self.base_s + self.token_s * num_tokens + self.context_s * attended
