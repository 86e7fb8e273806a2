"""Beam search over an engine: each step asks for the most likely next tokens of every live beam of every prompt.

A step of a beam is a request for one token with log-probabilities. Beams share the full blocks of what they have in
common through the prefix cache; of each, only the tokens after its last full block are computed again.
"""

from __future__ import annotations

import msgspec

from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.text.beam_search import candidates_of


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One beam, finished."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    """Sum over the output."""
    score: float
    """The score by which beams are ranked."""
    text: str
    """Text of the output."""
    finish_reason: str
    """"stop" or "length"."""


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamStep:
    """One beam's request for its next token."""

    def __init__(self, core: EngineCoreRequest) -> None:
        self.core = core
        self.candidates: list[tuple[int, float]] = []
        """(token id, log-probability), most likely first."""

    @property
    def finished(self) -> bool:
        return bool(self.candidates)

    def ended_here(self, output: EngineCoreOutput) -> bool:
        return False

    def process(self, output: EngineCoreOutput) -> None:
        """Raises: InternalError without log-probabilities."""
        self.candidates = candidates_of(output.new_logprobs)
