"""`LogprobsAccumulator`: the log-probabilities of one sequence's tokens, with their texts."""

from __future__ import annotations

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.text.request_output import CompletionOutput, Logprob
from pdserve.text.tokenizer import Tokenizer


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
