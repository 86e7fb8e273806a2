"""`LoopHistogram`: a Prometheus histogram of values that one event loop observes per token.

Prometheus' own takes two locks per value, since any thread may observe it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """Used in one event loop, also by `collect`."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        """bounds: upper bounds of the buckets, ascending; a last one without a bound is added."""
        self._name = name
        self._meaning = meaning
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        """Values per bucket, not cumulative."""
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, num_times: int = 1) -> None:
        """Count a value that was observed `num_times`."""
        self._counts[bisect_left(self._bounds, value)] += num_times
        self._sum += value * num_times

    def collect(self) -> Iterable[Metric]:
        """One family without labels."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._meaning, buckets, self._sum)
