"""`RequestMetrics`: times of the engine's events of one request, for offline callers."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from pdserve.common import clock
from pdserve.common.request.engine_types import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
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
    token_timestamps: dict[int, list[float]] = {}
    """Index of a sequence -> when the reader got each of its tokens so far; tokens that came together have one time."""
    events: list[EngineCoreEvent] = []
    """Events of all sequences so far, with `clock.monotonic()` of the engine's process."""

    @property
    def prompt_tokens(self) -> int:
        return self.num_prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self.num_generation_tokens

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

    def get_total_time(self) -> float | None:
        """Seconds from arrival to end."""
        return self.e2e_latency

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between two tokens of a sequence, of one sequence after the other."""
        return [late - early for times in self.token_timestamps.values() for early, late in pairwise(times)]

    def calculate_throughput(self) -> float | None:
        """Output tokens per second from arrival to end, or to the newest token; None before the first."""
        until = self.finished_time or self.last_token_time
        if until is None or until <= self.arrival_time:
            return None
        return self.num_generation_tokens / (until - self.arrival_time)

    @property
    def mean_time_per_output_token(self) -> float | None:
        """Seconds per token after the first token's; None for one token. Sequences of one request count together."""
        if self.first_token_time is None or self.last_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)

    def see(self, output: EngineCoreOutput) -> None:
        """Update from an output of an engine in this process."""
        self.events += output.events
        for event in output.events:
            if event.type is EngineCoreEventType.SCHEDULED and self.first_scheduled_time is None:
                self.first_scheduled_time = unix_s(event.timestamp)
        self.num_generation_tokens += len(output.new_token_ids)
        if output.new_token_ids:
            self.last_token_time = now = unix_s(clock.monotonic())
            self.token_timestamps.setdefault(output.index, []).extend([now] * len(output.new_token_ids))
            if self.first_token_time is None:
                self.first_token_time = unix_s(output.moments.get("first_token", clock.monotonic()))
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)

    def end(self) -> None:
        """Record the end, once, after the last output."""
        if self.finished_time is None:
            self.finished_time = unix_s(clock.monotonic())


def unix_s(monotonic_s: float) -> float:
    """`clock.monotonic()` seconds of this process -> seconds since 1970."""
    return to_unix_ns(monotonic_s) / 1e9


def monotonic_s(unix_s: float) -> float:
    """Seconds since 1970 -> `clock.monotonic()` seconds of this process."""
    return unix_s - to_unix_ns(0.0) / 1e9
