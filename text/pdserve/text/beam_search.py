"""Beam search: `BeamSearch` keeps the beams of one prompt, and is given the most likely next tokens of each.

Source: scores, early stopping and the order of ties follow beam search in transformers 5.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.common.request.sampling_params import SamplingParams

MAX_LENGTH_PENALTY = 32.0
"""Largest absolute value: a length to a higher power may overflow."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters by vLLM's name; `early_stopping` as in transformers."""

    beam_width: int
    """Beams that are kept, and answers that are returned; at least 1."""
    max_tokens: int = 16
    """Output tokens at most; at least 1."""
    length_penalty: float = 1.0
    """A finished beam's score is its cumulative log-probability over its length to this power: above 0 favours long."""
    early_stopping: bool | Literal["never"] = False
    """True ends when `beam_width` beams have finished; False when the best live one could not beat the worst of them at
    its present length; "never" when it could not at any length."""
    ignore_eos: bool = False
    """EOS ends no beam."""

    def verify(self, vocab_size: int, num_eos: int) -> None:
        """Raise `InvalidRequest` naming the field, its value and its limit."""
        if self.beam_width < 1 or self.num_candidates(num_eos) > vocab_size:
            most = vocab_size // self.num_candidates_per_beam(num_eos)
            raise InvalidRequest(
                f"beam_width must be from 1 to {most} with a vocabulary of {vocab_size} tokens, not {self.beam_width}",
                "beam_width",
            )
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, "
                f"not {self.length_penalty}",
                "length_penalty",
            )

    def num_candidates_per_beam(self, num_eos: int) -> int:
        return 2 if self.ignore_eos else max(2, 1 + num_eos)

    def num_candidates(self, num_eos: int) -> int:
        """Continuations considered in a step: if all the best ones end, `beam_width` others remain."""
        return self.num_candidates_per_beam(num_eos) * self.beam_width


@dataclass(frozen=True, slots=True)
class Beam:
    """Output tokens, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...] = ()
    cum_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    beam: Beam
    score: float


def step_params(num_candidates: int) -> SamplingParams:
    """Parameters of a request for the candidates of one beam's next token."""
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_candidates, seed=0)


def candidates_of(logprobs: LogprobsLists | None) -> list[tuple[int, float]]:
    """(token id, log-probability) of the answer to such a request, most likely first. Raises: InternalError without any."""
    if logprobs is None:
        raise InternalError("the engine sent no log-probabilities for a beam")
    # the sampled token is first, and again at its rank among the most likely
    return list(zip(logprobs.logprob_token_ids[0][1:], logprobs.logprobs[0][1:], strict=True))


def _grown(candidate: tuple[float, Beam, int]) -> Beam:
    """candidate: the sum of log-probabilities, the beam before, its next token."""
    cum_logprob, beam, token_id = candidate
    return Beam((*beam.token_ids, token_id), cum_logprob)


class BeamSearch:
    """The search over one prompt: `live` beams want candidates, `advance` takes them, until it is `done`."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int]) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.num_candidates = params.num_candidates(len(self._eos))
        self.live = [Beam()]
        """Best first."""
        self.finished: list[FinishedBeam] = []
        """Best first, at most `beam_width`."""
        self.done = False

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> None:
        """candidates: for each live beam its `num_candidates` most likely next tokens."""
        params = self._params
        length = len(self.live[0].token_ids) + 1
        # only what is kept is built: each beam is a copy of all its tokens
        grown = heapq.nlargest(
            self.num_candidates,
            (
                (beam.cum_logprob + logprob, beam, token_id)
                for beam, of_beam in zip(self.live, candidates, strict=True)
                for token_id, logprob in of_beam
            ),
            key=operator.itemgetter(0),
        )
        ends = [length == params.max_tokens or token_id in self._eos for _, _, token_id in grown]
        lives = [candidate for candidate, end in zip(grown, ends, strict=True) if not end]
        self.live = [_grown(candidate) for candidate in lives[: params.beam_width]]
        # candidates beyond the beam width may continue, but are not answers
        ended = [_grown(each) for each, end in zip(grown[: params.beam_width], ends, strict=False) if end]
        scored = [FinishedBeam(beam, beam.cum_logprob / float(length**params.length_penalty)) for beam in ended]
        self.finished = heapq.nlargest(params.beam_width, [*self.finished, *scored], key=lambda beam: beam.score)
        self.done = not self.live or (len(self.finished) == params.beam_width and not self._may_improve(length))

    def _may_improve(self, length: int) -> bool:
        """True if a live beam could still take the place of a finished one."""
        params = self._params
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        best = self.live[0].cum_logprob / float(length**params.length_penalty)
        return best > self.finished[-1].score

    def finish_reason(self, beam: Beam) -> str:
        return "stop" if beam.token_ids[-1] in self._eos else "length"
