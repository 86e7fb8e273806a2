"""`Target`: a limit that a part of all requests must keep."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.bench.summary import Latencies
from pdserve.common.errors import ConfigError

_NAMES = "ttft|tpot|e2el"
_FORM = re.compile(rf"({_NAMES})_p([0-9]{{1,2}}(?:\.[0-9]{{1,3}})?)=([0-9.eE+-]{{1,20}})")


@dataclass(frozen=True, slots=True)
class Target:
    """`ttft_p99=0.3`: of 99 % of all requests, the first token comes within 0.3 s. A failed request keeps no limit."""

    name: str
    percent: float
    limit_s: float

    def __str__(self) -> str:
        return f"{self.name}_p{self.percent:g}={self.limit_s:g}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises: ConfigError."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(f"--slo is {text[:80]!r}, {_NAMES}_pPERCENT=SECONDS is needed, such as ttft_p99=0.3")
        name, percent, limit = match.groups()
        try:
            limit_s = float(limit)
        except ValueError:
            limit_s = math.nan
        if not 0 < limit_s < math.inf:
            raise ConfigError(f"--slo is {text!r}: its limit is {limit}, seconds above 0 are needed")
        if not 0 < float(percent) < 100:
            raise ConfigError(f"--slo is {text!r}: its percentile is {percent}, above 0 and below 100 is needed")
        return cls(name, float(percent), limit_s)

    def attained(self, records: Sequence[RequestRecord]) -> float:
        """The part of the requests that keep the limit, 0 to 1; of no requests, 1."""
        return sum(self._seconds(record) <= self.limit_s for record in records) / len(records) if records else 1.0

    def is_met(self, records: Sequence[RequestRecord]) -> bool:
        return 100 * self.attained(records) >= self.percent

    def value_s(self, records: Sequence[RequestRecord]) -> float:
        """What `percent` of the requests keep, seconds; infinite if more of them fail. Of no requests, 0."""
        values = sorted(map(self._seconds, records))
        return values[max(0, math.ceil(len(values) * self.percent / 100) - 1)] if values else 0.0

    def _seconds(self, record: RequestRecord) -> float:
        """Infinite if it failed; 0 per token of an answer of one token."""
        if record.error is not None:
            return math.inf
        value: float | None = getattr(Latencies.of(record), self.name)
        return value or 0.0
