"""`MetricFamilies`: the metrics of a router process as they travel to its parent, and the sum of several processes'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_ADDED = ("counter", "histogram")
_Key = tuple[str, tuple[tuple[str, str], ...]]
_OF_GAUGES: dict[str, Callable[[Iterable[float]], float]] = {
    # all processes have the same workers, blocks and certificates
    "pdserve_workers": max,
    "pdserve_indexed_blocks": max,
    "pdserve_redis_up": min,
    "pdserve_tls_certificate_expiry_timestamp_seconds": min,
    "process_start_time_seconds": min,
    "process_max_fds": min,
}
"""Gauges whose values over several processes are not added."""


class MetricFamily(msgspec.Struct, array_like=True, frozen=True):
    """One metric with its samples."""

    name: str
    meaning: str
    kind: str
    """counter, gauge or histogram."""
    samples: list[tuple[str, dict[str, str], float]]
    """(name, labels, value)."""

    @classmethod
    def of(cls, metric: Metric) -> MetricFamily:
        samples = [(sample.name, sample.labels, float(sample.value)) for sample in metric.samples]
        return cls(metric.name, metric.documentation, metric.type, samples)

    def metric(self) -> Metric:
        made = Metric(self.name, self.meaning, self.kind)
        made.samples = [Sample(name, labels, value) for name, labels, value in self.samples]
        return made


class MetricFamilies(msgspec.Struct, array_like=True, frozen=True):
    """All metrics of one process."""

    families: list[MetricFamily] = []
    of_keys: list[MetricFamily] = []
    """Metrics per API key, which are for operators."""

    def lasting(self) -> MetricFamilies:
        """Without gauges: the part that still counts after the process has ended."""
        return MetricFamilies(
            *([each for each in part if each.kind in _ADDED] for part in (self.families, self.of_keys))
        )


def added(processes: Sequence[MetricFamilies]) -> MetricFamilies:
    """Counters and histograms are added; gauges are added, or are the largest or smallest value where that is their meaning."""
    return MetricFamilies(_added([each.families for each in processes]), _added([each.of_keys for each in processes]))


def _added(processes: Sequence[Sequence[MetricFamily]]) -> list[MetricFamily]:
    values: dict[str, dict[_Key, list[float]]] = {}
    first: dict[str, MetricFamily] = {}
    for families in processes:
        for family in families:
            first.setdefault(family.name, family)
            of_family = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                of_family.setdefault((name, tuple(labels.items())), []).append(value)
    made = []
    for name, family in first.items():
        combine = _OF_GAUGES.get(name, sum) if family.kind not in _ADDED else sum
        samples = [(sample, dict(labels), combine(each)) for (sample, labels), each in values[name].items()]
        made.append(MetricFamily(name, family.meaning, family.kind, samples))
    return made


class FamiliesRegistry(Collector):
    """Families in the place of a registry, for `generate_latest`."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return [family.metric() for family in self._families]


def families_of(registry: Collector | CollectorRegistry) -> list[MetricFamily]:
    """The metrics of a registry now."""
    return [MetricFamily.of(metric) for metric in registry.collect()]


def without_label(name: str, text: bytes) -> bytes:
    """Prometheus' text format without the series that have a label of this name."""
    # quotes in values are escaped, so that no value looks like a label
    series = re.compile(rb"[{,]" + name.encode() + rb'="')
    return b"".join(line for line in text.splitlines(keepends=True) if line.startswith(b"#") or not series.search(line))
