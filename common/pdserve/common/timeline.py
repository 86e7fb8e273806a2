"""The one vocabulary of moments, and the phases that are defined as differences of them.

Spans, metrics, benchmarks and the response's timings all read this file. A moment is recorded as `time.monotonic()`
seconds where it happens and travels as wall-clock nanoseconds (`Moment.unix_ns`), so phases that span two machines are
as exact as their clocks.

    router    arrived ─ tokenized ─ placed ──────────────────────────────── first_token ─────────────── finished
    prefill                          └ prefill_queued ─ prefill_started ─ prefill_computed
    decode                           └ decode_queued ─ kv_reserved ─ kv_first_landed ─ kv_landed ─ decode_started ─ decode_finished
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

ARRIVED = "arrived"
TOKENIZED = "tokenized"
PLACED = "placed"
PREFILL_QUEUED = "prefill_queued"
PREFILL_STARTED = "prefill_started"
PREFILL_COMPUTED = "prefill_computed"
DECODE_QUEUED = "decode_queued"
KV_RESERVED = "kv_reserved"
KV_FIRST_LANDED = "kv_first_landed"
KV_LANDED = "kv_landed"
DECODE_STARTED = "decode_started"
DECODE_FINISHED = "decode_finished"
FIRST_TOKEN = "first_token"
FINISHED = "finished"

MOMENTS = (
    ARRIVED,
    TOKENIZED,
    PLACED,
    PREFILL_QUEUED,
    PREFILL_STARTED,
    PREFILL_COMPUTED,
    FIRST_TOKEN,
    DECODE_QUEUED,
    KV_RESERVED,
    KV_FIRST_LANDED,
    KV_LANDED,
    DECODE_STARTED,
    DECODE_FINISHED,
    FINISHED,
)

_UNIX_MINUS_MONOTONIC_NS = time.time_ns() - time.monotonic_ns()
"""Taken once: two moments of one process never change order when the wall clock is set."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a request's life, from one moment to a later one."""

    name: str
    start: str
    end: str
    meaning: str


PHASES = (
    Phase("tokenize", ARRIVED, TOKENIZED, "chat template and tokenizer"),
    Phase("route", TOKENIZED, PLACED, "choosing the workers"),
    Phase("prefill queue", PREFILL_QUEUED, PREFILL_STARTED, "waiting for the prefill engine"),
    Phase("prefill", PREFILL_STARTED, PREFILL_COMPUTED, "computing the prompt and the first token"),
    Phase("kv transfer", KV_RESERVED, KV_LANDED, "pulling KV blocks; overlaps prefill"),
    Phase("kv exposed", PREFILL_COMPUTED, KV_LANDED, "what of the transfer was not hidden under prefill"),
    Phase("decode queue", KV_LANDED, DECODE_STARTED, "waiting for the decode engine"),
    Phase("decode", DECODE_STARTED, DECODE_FINISHED, "all further tokens"),
)


class Timeline:
    """The moments of one request, wall-clock nanoseconds; the first to report a moment of an attempt wins."""

    def __init__(self) -> None:
        self.moments_unix_ns: dict[str, int] = {}

    def mark(self, moment: str) -> None:
        """Record a moment of this process, now."""
        self.moments_unix_ns.setdefault(moment, now_unix_ns())

    def merge(self, moments_unix_ns: Mapping[str, int]) -> None:
        """Add a worker's moments; names outside the vocabulary, which a newer worker may send, are left out."""
        for name, unix_ns in moments_unix_ns.items():
            if name in MOMENTS:
                self.moments_unix_ns[name] = unix_ns

    def seconds(self, start: str, end: str) -> float | None:
        """From one moment to another; None unless both were seen. Never negative: clocks of two machines may differ."""
        if start not in self.moments_unix_ns or end not in self.moments_unix_ns:
            return None
        return max(0, self.moments_unix_ns[end] - self.moments_unix_ns[start]) / 1e9

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, as the router sees it."""
        return self.seconds(ARRIVED, FIRST_TOKEN)

    def tpot_s(self, num_output_tokens: int) -> float | None:
        """Time per output token after the first."""
        total = self.seconds(FIRST_TOKEN, FINISHED)
        return total / (num_output_tokens - 1) if total is not None and num_output_tokens > 1 else None

    def phases(self) -> list[tuple[Phase, float]]:
        """Every phase whose two moments were seen, with its seconds, in the order of `PHASES`."""
        timed = ((phase, self.seconds(phase.start, phase.end)) for phase in PHASES)
        return [(phase, seconds) for phase, seconds in timed if seconds is not None]


def now_unix_ns() -> int:
    """Wall clock that never goes back within one process."""
    return time.monotonic_ns() + _UNIX_MINUS_MONOTONIC_NS


def to_unix_ns(monotonic_s: float) -> int:
    """`time.monotonic()` seconds of this process -> wall-clock nanoseconds."""
    return int(monotonic_s * 1e9) + _UNIX_MINUS_MONOTONIC_NS
