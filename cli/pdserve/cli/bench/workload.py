"""The requests of a benchmark: random prompts, shared prefixes, conversations, and traces in Mooncake's format."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id of a trace stands for. Source: the traces published with Mooncake (FAST '25)."""
MAX_TRACE_LINE_BYTES = 1 << 20
MAX_TRACE_TOKENS = 1 << 24
"""Limit of a trace's prompt and of its answer."""

DrawTokens = Callable[[random.Random, int], list[int]]
"""(random numbers, length) -> token ids of that length."""


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


class TraceLine(msgspec.Struct):
    """One line of a trace."""

    timestamp: float
    """Milliseconds from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    """One id per 512 prompt tokens; equal ids stand for equal tokens."""


def trace_sessions(
    path: Path, seed: int, draw_tokens: DrawTokens, *, speed: float = 1.0, num: int | None = None
) -> Iterator[BenchSession]:
    """Read a trace of Mooncake's format, one JSON object per line.

    speed: 2 replays in half the time. num: number of lines, at most. Raises: ConfigError naming file and line.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    first_s: float | None = None
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"--trace is {path}, which cannot be read: {error.strerror}") from error
    with file as lines:
        number = 0
        while (num is None or number < num) and (line := lines.readline(MAX_TRACE_LINE_BYTES + 1)):
            number += 1
            if not line.strip():
                continue
            entry = _trace_line(decoder, line, f"{path}, line {number}")
            arrival_s = entry.timestamp / 1e3 / speed
            first_s = arrival_s if first_s is None else first_s
            yield BenchSession(
                [Turn(_trace_prompt(entry, seed, draw_tokens), entry.output_length)], arrival_s - first_s
            )


def _trace_line(decoder: msgspec.json.Decoder[TraceLine], line: bytes, label: str) -> TraceLine:
    if len(line) > MAX_TRACE_LINE_BYTES:
        raise ConfigError(f"{label}: longer than {MAX_TRACE_LINE_BYTES} bytes")
    try:
        entry = decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{label}: {error}") from error
    for name in ("input_length", "output_length"):
        if not 1 <= (value := getattr(entry, name)) <= MAX_TRACE_TOKENS:
            raise ConfigError(f"{label}: {name} is {value}, 1 to {MAX_TRACE_TOKENS} is needed")
    num_blocks = -(-entry.input_length // TRACE_BLOCK_TOKENS)
    if entry.hash_ids and len(entry.hash_ids) != num_blocks:
        raise ConfigError(
            f"{label}: {len(entry.hash_ids)} hash_ids for {entry.input_length} tokens, {num_blocks} blocks of "
            f"{TRACE_BLOCK_TOKENS} tokens are needed"
        )
    return entry


def _trace_prompt(entry: TraceLine, seed: int, draw_tokens: DrawTokens) -> list[int]:
    """Draw the prompt of a line; equal hash ids give equal tokens in every line."""
    if not entry.hash_ids:
        return draw_tokens(random.Random(f"{seed} {entry.timestamp} {entry.input_length}"), entry.input_length)
    prompt: list[int] = []
    for hash_id in entry.hash_ids:
        prompt += draw_tokens(random.Random(f"{seed} block {hash_id}"), TRACE_BLOCK_TOKENS)
    return prompt[: entry.input_length]
