"""`RequestMetrics`: times of the engine's events of one request, for offline callers."""

from __future__ import annotations

import time

import msgspec

from pdserve.common.request.engine_types import EngineCoreEventType, EngineCoreOutput
from pdserve.common.timeline import to_unix_ns


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times in seconds since 1970, on a clock that never goes back within a process; None for events that have not happened."""

    arrival_time: float
    """When the request was given to the engine."""
    first_scheduled_time: float | None = None
    """When it first entered a step."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    """Time of the newest output token so far."""
    finished_time: float | None = None
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    """Output tokens of all sequences so far."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds until it got its first place."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def mean_time_per_output_token(self) -> float | None:
        """Seconds per token after the first token's; None for one token. Sequences of one request count together."""
        if self.first_token_time is None or self.last_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)

    def see(self, output: EngineCoreOutput) -> None:
        """Update from an output of an engine in this process."""
        for event in output.events:
            if event.type is EngineCoreEventType.SCHEDULED and self.first_scheduled_time is None:
                self.first_scheduled_time = unix_s(event.timestamp)
        self.num_generation_tokens += len(output.new_token_ids)
        if output.new_token_ids:
            self.last_token_time = unix_s(time.monotonic())
            if self.first_token_time is None:
                self.first_token_time = unix_s(output.moments.get("first_token", time.monotonic()))
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)

    def end(self) -> None:
        """Record the end, once, after the last output."""
        if self.finished_time is None:
            self.finished_time = unix_s(time.monotonic())


def unix_s(monotonic_s: float) -> float:
    """`time.monotonic()` seconds of this process -> seconds since 1970."""
    return to_unix_ns(monotonic_s) / 1e9
