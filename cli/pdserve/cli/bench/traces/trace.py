"""`TraceSession` and `TraceRequest`: what a trace says of sessions, whatever its format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdserve.common.errors import ConfigError

MAX_TRACE_TOKENS = 1 << 24
"""Limit of a request's prompt and of its answer."""


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
    """Tokens per hash id."""
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


def verify_length(label: str, name: str, value: int, least: int = 1) -> None:
    """Raises: ConfigError naming place, field, value and limits."""
    if not least <= value <= MAX_TRACE_TOKENS:
        raise ConfigError(f"{label}: {name} is {value}, {least} to {MAX_TRACE_TOKENS} is needed")
