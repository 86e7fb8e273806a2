"""`Shape`: random sessions of a benchmark: their lengths, prefixes that they share, and their turns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.common.errors import ConfigError


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


def random_sessions(shape: Shape, num: int, seed: int) -> Iterator[TraceSession]:
    """Draw `num` sessions, all of one scope; equal arguments give equal sessions. A prefix is their only block with a hash id."""
    draw = random.Random(seed)

    def length(mean: int) -> int:
        lowest, highest = mean * (1 - shape.range_ratio), mean * (1 + shape.range_ratio)
        return max(1, draw.randint(round(lowest), round(highest)))

    for number in range(num):
        prefix = (draw.randrange(shape.num_prefixes),) if shape.prefix_tokens else ()
        said, turns = shape.prefix_tokens, list[TraceRequest]()
        for turn in range(shape.num_turns):
            num_input, num_output = length(shape.input_tokens), length(shape.output_tokens)
            turns.append(TraceRequest(f"session {number} turn {turn}", said + num_input, num_output, prefix))
            said += num_input + num_output
        yield TraceSession(f"session {number}", "", shape.prefix_tokens, tuple(turns))
