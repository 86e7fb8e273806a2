"""A router's metric with a label for each worker does not grow with the workers that there ever were."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter

from pdserve.router.telemetry.router_metrics import KEPT_S, PlacedCalls
from tests.router import candidates


class Calls:
    """The metric, on a clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._counter = Counter("calls", "Calls.", ("role", "worker"), registry=CollectorRegistry())
        self._placed = PlacedCalls(self._counter, clock=lambda: self.now_s)

    def add(self, *workers: Any) -> None:
        for worker in workers:
            self._placed.add("decode", worker)

    def values(self) -> dict[str, float]:
        [family] = self._counter.collect()
        return {sample.labels["worker"]: sample.value for sample in family.samples if sample.name == "calls_total"}


def test_workers_that_are_long_gone_have_no_series():
    calls = Calls()
    for number in range(300):
        # each is replaced by one of another name
        worker = candidates.worker(f"w{number}")
        calls.add(worker, worker)
        worker.mark_lost("replaced")
        calls.now_s += KEPT_S / 10
    assert calls.values() == {f"w{number}": 2 for number in range(289, 300)}
    calls.now_s += KEPT_S
    calls.add(candidates.worker("last"))
    assert calls.values() == {"last": 1}


def test_workers_that_live_and_those_that_come_back_keep_theirs():
    calls = Calls()
    idle, restarted, gone = (candidates.worker(name) for name in ("idle", "restarted", "gone"))
    calls.add(idle, restarted, gone)
    restarted.mark_lost("killed")
    gone.mark_lost("killed")
    calls.now_s += KEPT_S
    calls.add(candidates.worker("restarted"))
    calls.add(candidates.worker("new"))
    assert calls.values() == {"idle": 1, "restarted": 2, "gone": 1, "new": 1}
    calls.now_s += 1
    calls.add(candidates.worker("newer"))
    assert calls.values() == {"idle": 1, "restarted": 2, "new": 1, "newer": 1}
