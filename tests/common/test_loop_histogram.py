"""`LoopHistogram` is exposed as Prometheus' own histogram is."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from pdserve.common.telemetry.loop_histogram import LoopHistogram

BOUNDS = (0.001, 0.5, 10.0)


def test_it_is_exposed_as_a_histogram_with_the_same_values() -> None:
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = LoopHistogram("waits_seconds", "Waits.", BOUNDS, ours)
    other = Histogram("waits_seconds", "Waits.", buckets=BOUNDS, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for value in (0.0, 0.001, 0.25, 0.25, 3.0, 10.0, 11.0):
        own.observe(value)
        other.observe(value)
    own.observe(0.125, 3)
    for _ in range(3):
        other.observe(0.125)
    assert generate_latest(ours) == generate_latest(theirs)
