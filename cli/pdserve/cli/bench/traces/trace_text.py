"""`TraceText`: token ids for the prompts of a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.cli.bench.traces.trace import TraceRequest

DrawTokens = Callable[[random.Random, int], list[int]]
"""(random numbers, length) -> token ids of that length."""


@dataclass(frozen=True, slots=True)
class Said:
    """The last request of a session, with all that has been said since the session's beginning."""

    request: TraceRequest
    token_ids: Sequence[int]
    """Its prompt and its answer."""


class TraceText:
    """The text of one scope. Equal hash ids give equal tokens, and equal seeds equal texts.

    A prompt that continues the one before it in its session contains the answer to that: blocks that no prompt had before begin
    with what was said, and then have tokens drawn for their hash ids. A trace does not say where in a prompt an answer is; in a
    conversation it is there.
    """

    def __init__(self, seed: int | str, block_tokens: int, draw_tokens: DrawTokens) -> None:
        """block_tokens: tokens per hash id."""
        self._seed = seed
        self._block_tokens = block_tokens
        self._draw_tokens = draw_tokens
        self._seen: set[int] = set()
        self._said: dict[int, list[int]] = {}
        """Hash id -> tokens of the blocks that have a part of an answer, or of a prompt's end. Others can be drawn again."""

    def prompt(self, request: TraceRequest, before: Said | None = None) -> list[int]:
        """Token ids of a request's prompt. before: what was said in its session; None for its first request."""
        said = before.token_ids if before is not None and _continues(request, before.request) else ()
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            if len(tokens) >= request.input_tokens:
                break
            if hash_id not in self._seen:
                self._seen.add(hash_id)
                if known := said[len(tokens) : len(tokens) + self._block_tokens]:
                    self._said[hash_id] = [*known, *self._drawn(hash_id)[len(known) :]]
            tokens += self._said.get(hash_id) or self._drawn(hash_id)
        del tokens[request.input_tokens :]
        tokens += said[len(tokens) : request.input_tokens]
        draw = random.Random(f"{self._seed} end {request.name}")
        return tokens + self._draw_tokens(draw, request.input_tokens - len(tokens))

    def _drawn(self, hash_id: int) -> list[int]:
        return self._draw_tokens(random.Random(f"{self._seed} block {hash_id}"), self._block_tokens)


def _continues(request: TraceRequest, last: TraceRequest) -> bool:
    """True if the prompt has all full blocks of the last one: nothing in it was edited."""
    return request.hash_ids[: len(last.hash_ids)] == last.hash_ids and request.input_tokens >= last.input_tokens
