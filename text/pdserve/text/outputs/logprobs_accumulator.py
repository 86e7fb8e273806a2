"""Log-probabilities with their texts: of one sequence's tokens, and of a prompt, put together from pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pdserve.common.errors import InternalError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.text.outputs.request_output import CompletionOutput, Logprob
from pdserve.text.tokenization.tokenizer import Tokenizer


class LogprobsAccumulator:
    """One sequence's log-probabilities, decoded."""

    __slots__ = ("_cumulative", "_logprobs", "_offsets", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None leaves tokens without text."""
        self._tokenizer = tokenizer
        self._cumulative = 0.0
        self._logprobs: list[dict[int, Logprob]] = []
        self._offsets: list[int] = []

    def add(self, output: CompletionOutput, logprobs: LogprobsLists | None, offsets: list[int]) -> None:
        """Store the log-probabilities of an output's tokens, and set them in the output. logprobs: None for an output without
        tokens."""
        output.text_offsets = offsets[: len(output.token_ids)]
        output.logprobs = [] if logprobs is None else self.decoded(logprobs)
        for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
            self._cumulative += candidates[token_id].logprob
        output.cumulative_logprob = self._cumulative
        self._logprobs += output.logprobs
        self._offsets += output.text_offsets

    def fill(self, output: CompletionOutput) -> None:
        """Set all log-probabilities so far in `output`."""
        output.logprobs, output.text_offsets = list(self._logprobs), list(self._offsets)
        output.cumulative_logprob = self._cumulative

    def decoded(self, logprobs: LogprobsLists) -> list[dict[int, Logprob]]:
        """Per token, its candidates with their texts: the sampled token, then the most likely tokens, best first."""
        columns = zip(logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks, strict=True)
        return [
            {
                token_id: self._candidate(token_id, value, rank)
                # a sampled token among the most likely ones stays first, with its rank
                for token_id, value, rank in zip(token_ids, values, (sampled_rank, *range(1, len(values))), strict=True)
            }
            for token_ids, values, sampled_rank in columns
        ]

    def _candidate(self, token_id: int, value: float, rank: int) -> Logprob:
        piece = b"" if self._tokenizer is None else self._tokenizer.token_piece(token_id)
        return Logprob(logprob=value, rank=rank, decoded_token=piece.decode(errors="replace"), decoded_bytes=piece)


C = TypeVar("C")


class PromptLogprobsLedger(Generic[C]):
    """Accepts each prompt position once, from any attempt. C: the converted form of a token's candidates."""

    def __init__(
        self, num_prompt_tokens: int, decode: Callable[[LogprobsLists], list[C]], num_tokens_before: int = 0
    ) -> None:
        """num_tokens_before: the first of these tokens that have none, since earlier turns of a session have them."""
        self._num_prompt_tokens = num_prompt_tokens
        self._decode = decode
        self._candidates: list[C | None] = [None] * max(1, num_tokens_before)
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
        """One entry per prompt token, None for the first and for those of earlier turns.

        Raises: InternalError if some have not arrived.
        """
        if len(self._candidates) != self._num_prompt_tokens:
            raise InternalError(
                f"the engine sent log-probabilities of {len(self._candidates)} of {self._num_prompt_tokens} prompt tokens"
            )
        return self._candidates
