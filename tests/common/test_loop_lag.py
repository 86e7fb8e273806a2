"""`LoopLag`: what a callback that takes long does to the metric, and to the log."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from prometheus_client import CollectorRegistry

from pdserve.common.net.loop_lag import LOOK_EVERY_S, WARN_EVERY_S, LoopLag
from tests.support.run.waiting import eventually


def buckets(registry: CollectorRegistry) -> dict[float, float]:
    """Upper bound -> how many were at most so late."""
    (family,) = registry.collect()
    return {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}


async def test_a_callback_that_takes_long_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    watching = asyncio.create_task(LoopLag(registry).run())
    await asyncio.sleep(LOOK_EVERY_S / 2)
    with caplog.at_level(logging.WARNING):
        time.sleep(0.6)  # noqa: ASYNC251 - it is what is to be seen
        await eventually(lambda: caplog.records)
    seen = buckets(registry)
    assert seen[float("inf")] - seen[0.25] >= 1
    assert "the event loop was blocked for " in caplog.text
    watching.cancel()


def test_one_warning_names_the_longest_since_the_last(caplog: pytest.LogCaptureFixture) -> None:
    lag = LoopLag(CollectorRegistry())
    with caplog.at_level(logging.WARNING):
        lag.observe(0.2, 100.0)
        assert not caplog.records
        lag.observe(0.3, 101.0)
        lag.observe(7.0, 102.0)
        lag.observe(0.5, 103.0)
        assert [record.args for record in caplog.records] == [(0.3,)]
        lag.observe(0.0, 101.0 + WARN_EVERY_S)
        assert [record.args for record in caplog.records] == [(0.3,), (7.0,)]
        lag.observe(0.0, 102.0 + 2 * WARN_EVERY_S)
    assert len(caplog.records) == 2
