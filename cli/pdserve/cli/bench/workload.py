"""The requests of a benchmark: random prompts, shared prefixes, conversations, and traces in Mooncake's format."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.cli.bench.traces.mooncake import BLOCK_TOKENS, read_mooncake
from pdserve.cli.bench.traces.trace_text import DrawTokens, TraceText
from pdserve.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the prompt tokens that it adds to its session's text, and the number of output tokens."""

    token_ids: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class BenchSession:
    """Turns of one client. Each is sent when the one before has been answered."""

    turns: list[Turn]
    arrival_s: float | None = None
    """Seconds from the start of a trace; None: `LoadPlan` decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of random sessions, in tokens."""

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0
    """Lengths are drawn evenly from `(1 - range_ratio) * n` to `(1 + range_ratio) * n`."""
    prefix_tokens: int = 0
    """Length of the prefix before the `input_tokens` of each session's first prompt; one of `num_prefixes`."""
    num_prefixes: int = 1
    num_turns: int = 1

    def verify(self) -> None:
        """Raises: ConfigError naming the option, its value and its limit."""
        for name in ("input_tokens", "output_tokens", "num_prefixes", "num_turns"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}, at least 1 is needed")
        if self.prefix_tokens < 0:
            raise ConfigError(f"--prefix-tokens is {self.prefix_tokens}, at least 0 is needed")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio is {self.range_ratio}, 0 or more and below 1 is needed")


def random_sessions(shape: Shape, num: int, seed: int, draw_tokens: DrawTokens) -> Iterator[BenchSession]:
    """Draw `num` sessions; equal arguments give equal sessions."""
    draw = random.Random(seed)
    prefixes = [draw_tokens(draw, shape.prefix_tokens) for _ in range(shape.num_prefixes)]

    def length(mean: int) -> int:
        lowest, highest = mean * (1 - shape.range_ratio), mean * (1 + shape.range_ratio)
        return max(1, draw.randint(round(lowest), round(highest)))

    for _ in range(num):
        prefix = draw.choice(prefixes)
        turns = [
            Turn(
                (prefix if number == 0 else []) + draw_tokens(draw, length(shape.input_tokens)),
                length(shape.output_tokens),
            )
            for number in range(shape.num_turns)
        ]
        yield BenchSession(turns)


def trace_sessions(
    path: Path, seed: int, draw_tokens: DrawTokens, *, speed: float = 1.0, num: int | None = None
) -> Iterator[BenchSession]:
    """Read a trace of Mooncake's format, one JSON object per line.

    speed: 2 replays in half the time. num: number of lines, at most. Raises: ConfigError naming file and line.
    """
    text = TraceText(seed, BLOCK_TOKENS, draw_tokens)
    for session in read_mooncake(path, num):
        for request in session.requests:
            yield BenchSession([Turn(text.prompt(request), request.output_tokens)], session.start_s / speed)
