"""`TraceTexts`: token ids for the prompts of a trace."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.common.errors import ConfigError

DrawTokens = Callable[[random.Random, int], list[int]]
"""(random numbers, length) -> token ids of that length."""
MAX_DRAWN_TOKENS = 1 << 27
"""Limit of all that is drawn before a run, a block with a hash id once: 512 MiB."""


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
        """Hash ids of the blocks whose tokens a prompt has had: they stay what they are."""
        self._planned_blocks: set[int] = set()
        self._planned_ends: dict[str, int] = {}
        self._blocks: dict[int, array[int]] = {}
        self._ends: dict[str, array[int]] = {}
        """Name of a request -> tokens after its blocks and after what was said, drawn before the run."""

    def plan(self, request: TraceRequest, last: TraceRequest | None) -> int:
        """Have `draw_planned` draw what the request's prompt needs. Returns the number of tokens.

        last: the request before it in its session.
        """
        num_planned = num_known = 0
        for hash_id in request.hash_ids:
            if num_known >= request.input_tokens:
                break
            if hash_id not in self._planned_blocks:
                self._planned_blocks.add(hash_id)
                num_planned += self._block_tokens
            num_known += self._block_tokens
        if last is not None and continues(request, last):
            num_known = max(num_known, last.input_tokens + last.output_tokens)
        if (num_end := request.input_tokens - num_known) > 0:
            self._planned_ends[request.name] = num_end
            num_planned += num_end
        return num_planned

    def draw_planned(self) -> None:
        """Draw what was planned, so that no time is spent on it during the run."""
        self._blocks = {hash_id: array("I", self._drawn(hash_id)) for hash_id in self._planned_blocks}
        self._ends = {name: array("I", self._end(name, num)) for name, num in self._planned_ends.items()}

    def prompt(self, request: TraceRequest, before: Said | None = None) -> list[int]:
        """Token ids of a request's prompt. before: what was said in its session; None for its first request."""
        said: Sequence[int] = before.token_ids if before is not None and continues(request, before.request) else ()
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            if len(tokens) >= request.input_tokens:
                break
            if (block := self._blocks.get(hash_id)) is None:
                block = self._blocks[hash_id] = array("I", self._drawn(hash_id))
            if hash_id not in self._seen:
                self._seen.add(hash_id)
                known = said[len(tokens) : len(tokens) + self._block_tokens]
                block[: len(known)] = array("I", known)
            tokens += block
        del tokens[request.input_tokens :]
        tokens += said[len(tokens) : request.input_tokens]
        num_end = request.input_tokens - len(tokens)
        end: Sequence[int] = self._ends.pop(request.name, ())
        if len(end) < num_end:
            end = self._end(request.name, num_end)
        return tokens + list(end[:num_end])

    def _drawn(self, hash_id: int) -> list[int]:
        return self._draw_tokens(random.Random(f"{self._seed} block {hash_id}"), self._block_tokens)

    def _end(self, name: str, num: int) -> list[int]:
        return self._draw_tokens(random.Random(f"{self._seed} end {name}"), num)


class TraceTexts:
    """The texts of all scopes of a run."""

    def __init__(self, seed: int | str, draw_tokens: DrawTokens) -> None:
        self._seed = seed
        self._draw_tokens = draw_tokens
        self._texts: dict[str, TraceText] = {}

    def of(self, session: TraceSession) -> TraceText:
        """The text of a session's scope."""
        if (text := self._texts.get(session.scope)) is None:
            text = TraceText(f"{self._seed} {session.scope}", session.block_tokens, self._draw_tokens)
            self._texts[session.scope] = text
        return text

    def prepare(self, sessions: Iterable[TraceSession]) -> None:
        """Draw what the prompts of the sessions need. Raises: ConfigError for more than `MAX_DRAWN_TOKENS`."""
        num_planned = 0

        def plan(session: TraceSession) -> None:
            nonlocal num_planned
            text, last = self.of(session), None
            for step in session.steps:
                if isinstance(step, TraceSession):
                    plan(step)
                    continue
                num_planned += text.plan(step, last)
                last = step
                if num_planned > MAX_DRAWN_TOKENS:
                    raise ConfigError(
                        f"the prompts have more than {MAX_DRAWN_TOKENS} tokens together, which are drawn before the run: --num "
                        "takes fewer of them, and of a trace --trace-scale shorter ones"
                    )

        for session in sessions:
            plan(session)
        for text in self._texts.values():
            text.draw_planned()


def continues(request: TraceRequest, last: TraceRequest) -> bool:
    """True if the prompt has all full blocks of the last one: nothing in it was edited."""
    return request.hash_ids[: len(last.hash_ids)] == last.hash_ids and request.input_tokens >= last.input_tokens
