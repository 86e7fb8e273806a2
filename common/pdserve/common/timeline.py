"""The one vocabulary of moments, and the phases that are defined as differences of them.

Spans, metrics, benchmarks and the response's timings all read this file. A moment is recorded as `clock.monotonic()`
seconds where it happens and travels as wall-clock nanoseconds (`Moment.unix_ns`), so phases that span two machines are
as exact as their clocks.

    router    arrived ─ tokenized ─ admitted ─ placed ─ attempted ──────── first_token ─────────────── finished
    prefill                                       └ prefill_queued ─ prefill_started ─ prefill_computed
    worker that reads cached blocks of another    └ ..._queued ─ blocks_reserved ─ blocks_landed ─ ..._started
    decode                                        └ decode_queued ─ kv_reserved ─ kv_first_landed ─ kv_landed ─ ...
                                                                       ... decode_started ─ decode_finished

The critical path runs along the top to `attempted`, through prefill, and with the landing of the last block to decode;
each of its phases ends where the next begins, so together they are the whole request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.common import clock

ARRIVED = "arrived"
TOKENIZED = "tokenized"
ADMITTED = "admitted"
PLACED = "placed"
ATTEMPTED = "attempted"
PREFILL_QUEUED = "prefill_queued"
BLOCKS_RESERVED = "blocks_reserved"
BLOCKS_LANDED = "blocks_landed"
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
    ADMITTED,
    PLACED,
    ATTEMPTED,
    PREFILL_QUEUED,
    BLOCKS_RESERVED,
    BLOCKS_LANDED,
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

_OF_THE_ROUTER = (ARRIVED, TOKENIZED, ADMITTED, PLACED, FIRST_TOKEN)


def _unix_minus_monotonic_ns(num_samples: int = 16) -> int:
    """The sample whose two readings lie closest: a process that loses the CPU between them would be wrong for life."""
    samples = []
    for _ in range(num_samples):
        before, unix, after = clock.monotonic_ns(), clock.unix_ns(), clock.monotonic_ns()
        samples.append((after - before, unix - (before + after) // 2))
    return min(samples)[1]


_UNIX_MINUS_MONOTONIC_NS = _unix_minus_monotonic_ns()
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
    Phase("route", ADMITTED, PLACED, "choosing the workers"),
    Phase("prefill queue", PREFILL_QUEUED, PREFILL_STARTED, "waiting for the prefill engine"),
    Phase("block move", BLOCKS_RESERVED, BLOCKS_LANDED, "reading cached blocks of the prompt from another worker"),
    Phase("prefill", PREFILL_STARTED, PREFILL_COMPUTED, "computing the prompt and the first token"),
    Phase("kv transfer", KV_RESERVED, KV_LANDED, "pulling KV blocks; overlaps prefill"),
    Phase("kv exposed", PREFILL_COMPUTED, KV_LANDED, "the part of the transfer that did not overlap with prefill"),
    Phase("decode queue", KV_LANDED, DECODE_STARTED, "waiting for the decode engine"),
    Phase("decode", DECODE_STARTED, DECODE_FINISHED, "all further tokens"),
)

CRITICAL_PATH = (
    (ARRIVED, "tokenize", "chat template, tokenizer, limits"),
    (TOKENIZED, "admission", "waiting for a place at the workers"),
    (ADMITTED, "route", "choosing the workers"),
    (PLACED, "prepare", "hashing the prompt, and attempts that failed"),
    (ATTEMPTED, "dispatch", "from the router into the engine's queue"),
    (PREFILL_QUEUED, "prefill_queue", "waiting for the prefill engine"),
    (BLOCKS_RESERVED, "block_move", "reading cached blocks of the prompt from another worker"),
    (PREFILL_STARTED, "prefill", "computing the prompt and the first token"),
    (PREFILL_COMPUTED, "decode_reserve", "waiting for blocks at decode, if they were reserved after prefill"),
    (KV_RESERVED, "kv_exposed", "the part of the transfer that did not overlap with prefill"),
    (KV_LANDED, "decode_queue", "waiting for the decode engine"),
    (DECODE_STARTED, "decode", "all further tokens"),
    (DECODE_FINISHED, "deliver", "from the engine's last token to the client's stream"),
)
"""Moment, the phase that it begins, and what happens in it; a phase ends with the next moment that was seen."""
PATH_PHASES = tuple(phase for _, phase, _ in CRITICAL_PATH)


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

    def begin_attempt(self) -> None:
        """Begin a further attempt: moments from workers of earlier attempts are not part of its path."""
        seen = self.moments_unix_ns
        self.moments_unix_ns = {name: seen[name] for name in _OF_THE_ROUTER if name in seen}
        self.moments_unix_ns[ATTEMPTED] = now_unix_ns()

    def critical_path(self, end_unix_ns: int) -> dict[str, float]:
        """Phase -> seconds, from `arrived` to `end_unix_ns`; their sum is the whole.

        A request that was cut short ends within a phase, and has those up to it. Where another machine's clock
        contradicts the order, a phase is empty rather than negative, and its neighbour pays.
        """
        seen = self.moments_unix_ns
        named = {moment: phase for moment, phase, _ in CRITICAL_PATH if moment in seen}
        if DECODE_QUEUED not in seen and FINISHED in seen and PREFILL_COMPUTED in named:
            named[PREFILL_COMPUTED] = "deliver"  # one token was wanted, and it was prefill's
        elif PREFILL_COMPUTED not in seen or seen.get(KV_RESERVED, 0) <= seen[PREFILL_COMPUTED]:
            named.pop(KV_RESERVED, None)  # there was room in time
            if PREFILL_COMPUTED in named:
                named[PREFILL_COMPUTED] = "kv_exposed"
        path = [(seen[moment], phase) for moment, phase in named.items()]
        seconds: dict[str, float] = {}
        at = path[0][0] if path else end_unix_ns
        for (_, phase), (following, _) in zip(path, [*path[1:], (end_unix_ns, "")], strict=True):
            until = min(max(at, following), max(at, end_unix_ns))
            seconds[phase] = seconds.get(phase, 0.0) + (until - at) / 1e9
            at = until
        return seconds

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
    return clock.monotonic_ns() + _UNIX_MINUS_MONOTONIC_NS


def to_unix_ns(monotonic_s: float) -> int:
    """`clock.monotonic()` seconds of this process -> wall-clock nanoseconds."""
    return int(monotonic_s * 1e9) + _UNIX_MINUS_MONOTONIC_NS
