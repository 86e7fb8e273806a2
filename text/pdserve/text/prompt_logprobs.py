"""`PromptLogprobsLedger`: collects the log-probabilities of one prompt from pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import LogprobsLists

C = TypeVar("C")


class PromptLogprobsLedger(Generic[C]):
    """Accepts each prompt position once, from any attempt. C: the converted form of a token's candidates."""

    def __init__(self, num_prompt_tokens: int, decode: Callable[[LogprobsLists], list[C]]) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._decode = decode
        self._candidates: list[C | None] = [None]
        """Entries of the prompt tokens so far; the first token has none."""

    def add(self, first_position: int, logprobs: LogprobsLists) -> None:
        """Add consecutive prompt positions, of which some may be known. Raises: InternalError if a position before them is
        missing."""
        num_known = len(self._candidates) - first_position
        if num_known < 0:
            raise InternalError(
                f"log-probabilities of the prompt go on at {first_position}, but {len(self._candidates)} is next"
            )
        if num_known < len(logprobs):
            self._candidates += self._decode(logprobs.part(num_known))

    @property
    def whole(self) -> list[C | None]:
        """One entry per prompt token, None for the first. Raises: InternalError if some have not arrived."""
        if len(self._candidates) != self._num_prompt_tokens:
            raise InternalError(
                f"the engine sent log-probabilities of {len(self._candidates)} of {self._num_prompt_tokens} prompt tokens"
            )
        return self._candidates
