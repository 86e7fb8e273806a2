"""`TraceSession` and `TraceRequest`: what a trace says of sessions, whatever its format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdserve.common.errors import ConfigError

MAX_TRACE_TOKENS = 1 << 24
"""Limit of a request's prompt and of its answer."""
MAX_TRACE_S = 1e10
"""Limit of times, in either direction: 300 years, so that times since 1970 are possible, too."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. A trace has no texts: equal hash ids stand for equal tokens."""

    name: str
    """Unique in its trace."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One per block of the prompt, the first ones first; the last block may be shorter, or have no id."""
    think_s: float = 0.0
    """Seconds between the end of what precedes it in its session and its sending."""


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Requests of one client, each sent when what precedes it has ended."""

    name: str
    scope: str
    """Hash ids mean the same in sessions of one scope."""
    block_tokens: int
    """Tokens per hash id; 0 in a trace without hash ids."""
    steps: tuple[TraceRequest | TraceSession, ...]
    """Requests, and the sub-agents that begin after the request before them. The next request waits for these."""
    start_s: float = 0.0
    """Seconds from the start of the trace; of a sub-agent, from the end of the request before it."""
    is_background: bool = False
    """True for a sub-agent for which no request waits."""

    @property
    def requests(self) -> Iterator[TraceRequest]:
        """All requests, those of sub-agents included."""
        for step in self.steps:
            if isinstance(step, TraceRequest):
                yield step
            else:
                yield from step.requests

    def scaled(self, divisor: int) -> TraceSession:
        """The session with all lengths divided by `divisor`, blocks included. Raises: ConfigError if a block is no multiple."""
        if divisor < 1 or self.block_tokens % divisor:
            raise ConfigError(
                f"session {self.name}: blocks of {self.block_tokens} tokens cannot be divided by {divisor}, a divisor of "
                f"{self.block_tokens} is needed"
            )
        return replace(
            self,
            block_tokens=self.block_tokens // divisor,
            steps=tuple(
                replace(
                    step,
                    input_tokens=max(1, step.input_tokens // divisor),
                    output_tokens=max(1, round(step.output_tokens / divisor)),
                )
                if isinstance(step, TraceRequest)
                else step.scaled(divisor)
                for step in self.steps
            ),
        )

    def timed(self, speed: float, max_think_s: float) -> TraceSession:
        """The session with all times divided by `speed`, after the waits within it were cut to `max_think_s`."""

        def wait(seconds: float) -> float:
            return min(seconds, max_think_s) / speed

        def step_of(step: TraceRequest | TraceSession) -> TraceRequest | TraceSession:
            if isinstance(step, TraceRequest):
                return replace(step, think_s=wait(step.think_s))
            return replace(step.timed(speed, max_think_s), start_s=wait(step.start_s))

        return replace(self, start_s=self.start_s / speed, steps=tuple(map(step_of, self.steps)))


def verify_length(label: str, name: str, value: int, least: int = 1) -> None:
    """Raises: ConfigError naming place, field, value and limits."""
    if not least <= value <= MAX_TRACE_TOKENS:
        raise ConfigError(f"{label}: {name} is {str(value)[:40]}, {least} to {MAX_TRACE_TOKENS} is needed")


def verify_time(label: str, name: str, seconds: float | None, least: float = -MAX_TRACE_S) -> None:
    """seconds: None is always right. Raises: ConfigError naming place, field, value and limits."""
    if seconds is not None and not (math.isfinite(seconds) and least <= seconds <= MAX_TRACE_S):
        raise ConfigError(f"{label}: {name} is {seconds:g} s, {least:g} to {MAX_TRACE_S:g} s is needed")
