"""`StepTimes`: how long a step of an engine takes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """What a step computes of one sequence."""

    num_tokens: int
    """Tokens that it computes."""
    num_before: int
    """Tokens of the sequence that were computed before, and that these attend to."""
    num_outputs: int = 0
    """Tokens that are sampled after it: one at the end of a prompt, one for each sequence that continues the prompt."""


class StepTimes(abc.ABC):
    """The times of one device, one model and one set of settings."""

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds from one step's schedule to the next, with all that an engine does in between."""
        singles = [chunk for chunk in chunks if chunk.num_tokens == 1 and chunk.num_outputs == 1]
        parts = [chunk for chunk in chunks if chunk.num_tokens != 1 or chunk.num_outputs != 1]
        return self.batch_s(parts, len(singles), sum(single.num_before for single in singles))

    @abc.abstractmethod
    def batch_s(self, parts: Sequence[Chunk], num_singles: int, num_before: int) -> float:
        """The same of some chunks, and of sequences that compute and sample a token each.

        num_singles: these sequences. num_before: tokens that were computed before, of all of them together.
        """


@dataclass(frozen=True, slots=True)
class LinearStepTimes(StepTimes):
    """A time per step, per token, and per token that a computed token attends to."""

    base_s: float
    token_s: float
    context_s: float = 0.0

    def batch_s(self, parts: Sequence[Chunk], num_singles: int, num_before: int) -> float:
        num_tokens = num_singles + sum(part.num_tokens for part in parts)
        attended: float = num_before + num_singles
        attended += sum(part.num_tokens * (part.num_before + (part.num_tokens + 1) / 2) for part in parts)
        return self.base_s + self.token_s * num_tokens + self.context_s * attended
