"""`Summary`: percentiles, throughput, goodput and failures of a run. docs/benchmark.md defines each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.common.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2el")
TITLES = {
    "ttft": "first token",
    "itl": "between chunks",
    "tpot": "per token",
    "e2el": "end to end",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of values in milliseconds; all None without values."""

    count: int
    mean: float | None
    std: float | None
    least: float | None
    most: float | None
    percentiles: dict[int, float | None]

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Distribution:
        if not values_s:
            return cls(0, None, None, None, None, dict.fromkeys(PERCENTILES))
        values = np.asarray(values_s) * 1e3
        at = np.percentile(values, PERCENTILES)
        return cls(
            len(values), float(values.mean()), float(values.std()), float(values.min()), float(values.max()),
            {part: float(value) for part, value in zip(PERCENTILES, at, strict=True)},
        )  # fmt: skip

    @classmethod
    def counted(cls, counts_s: Mapping[float, int]) -> Distribution:
        """counts_s: value -> how often it came."""
        values = np.array(sorted(counts_s)) * 1e3
        counts = np.array([counts_s[value] for value in sorted(counts_s)])
        if not (total := int(counts.sum())):
            return cls.of(())
        mean = float((values * counts).sum() / total)
        std = float(((values - mean) ** 2 * counts).sum() / total) ** 0.5
        # the value at its place among all of them, in their order
        places = np.searchsorted(np.cumsum(counts), [part / 100 * (total - 1) for part in PERCENTILES], side="right")
        return cls(
            total, mean, std, float(values[0]), float(values[-1]),
            {part: float(values[place]) for part, place in zip(PERCENTILES, places, strict=True)},
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one answered request, seconds."""

    ttft: float
    tpot: float | None
    """None for an answer of one token."""
    e2el: float
    gaps: list[float]
    """Times between consecutive chunks."""

    @classmethod
    def of(cls, record: RequestRecord) -> Latencies:
        first, last = record.chunk_s[0], record.chunk_s[-1]
        num_tokens = record.output_tokens if record.output_tokens is not None else len(record.chunk_s)
        return cls(
            ttft=first - record.sent_s,
            tpot=(last - first) / (num_tokens - 1) if num_tokens > 1 else None,
            e2el=last - record.sent_s,
            gaps=[after - before for before, after in zip(record.chunk_s, record.chunk_s[1:], strict=False)],
        )

    def meets(self, targets_ms: dict[str, float]) -> bool:
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        return all((value := values[name]) is None or value * 1e3 <= limit for name, limit in targets_ms.items())


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of one run. Times in seconds, distributions in milliseconds."""

    duration_s: float
    completed: int
    failures: dict[str, int]
    """Kind -> count."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None: the server does not report it."""
    good: int | None
    """Requests that met all targets; None: no targets."""
    late_s: float
    """Longest time between a request's arrival time and its sending."""
    distributions: dict[str, Distribution]

    @classmethod
    def of(cls, records: Sequence[RequestRecord], targets_ms: dict[str, float]) -> Summary:
        answered = [record for record in records if record.error is None]
        latencies = [Latencies.of(record) for record in answered]
        cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
        return cls(
            duration_s=max((r.ended_s or 0.0 for r in records), default=0.0)
            - min((r.sent_s for r in records), default=0.0),
            completed=len(answered),
            failures=dict(Counter(record.error for record in records if record.error is not None).most_common()),
            input_tokens=sum(record.prompt_tokens or 0 for record in answered),
            output_tokens=sum(
                record.output_tokens if record.output_tokens is not None else len(record.chunk_s) for record in answered
            ),
            cached_tokens=sum(cached) if cached else None,
            good=sum(one.meets(targets_ms) for one in latencies) if targets_ms else None,
            late_s=max((record.sent_s - record.scheduled_s for record in records), default=0.0),
            distributions={
                "ttft": Distribution.of([one.ttft for one in latencies]),
                "itl": Distribution.of([gap for one in latencies for gap in one.gaps]),
                "tpot": Distribution.of([one.tpot for one in latencies if one.tpot is not None]),
                "e2el": Distribution.of([one.e2el for one in latencies]),
            },
        )

    def figures(self) -> dict[str, float | int | None]:
        """Name -> value; names are those of vLLM's `bench serve` where it has the figure."""
        per_s = (lambda value: value / self.duration_s) if self.duration_s else (lambda value: 0.0)
        flat: dict[str, float | int | None] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": sum(self.failures.values()),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "total_cached_tokens": self.cached_tokens,
            "request_throughput": per_s(self.completed),
            "request_goodput": None if self.good is None else per_s(self.good),
            "output_throughput": per_s(self.output_tokens),
            "total_token_throughput": per_s(self.input_tokens + self.output_tokens),
            "max_send_delay_ms": self.late_s * 1e3,
        }
        for name, values in self.distributions.items():
            flat |= {
                f"mean_{name}_ms": values.mean,
                f"median_{name}_ms": values.percentiles[50],
                f"std_{name}_ms": values.std,
            }
            flat |= {f"p{part}_{name}_ms": value for part, value in values.percentiles.items()}
            flat |= {f"min_{name}_ms": values.least, f"max_{name}_ms": values.most}
        return flat


def parse_targets(words: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:200 tpot:50` into name -> milliseconds. Raises: ConfigError."""
    targets: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if not colon or name not in ("ttft", "tpot", "e2el") or not 0 < limit < float("inf"):
            raise ConfigError(
                f"--goodput is {word!r}, ttft, tpot or e2el with milliseconds is needed, such as ttft:200"
            )
        targets[name] = limit
    return targets
