"""A router's metric with a label for each worker does not grow with the workers that there ever were."""

from __future__ import annotations

import candidates
from prometheus_client import CollectorRegistry, Counter

from pdserve.router.telemetry.placed_legs import KEPT_S, PlacedLegs


class Legs:
    """The metric, on a clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._counter = Counter("legs", "Legs.", ("role", "worker"), registry=CollectorRegistry())
        self._placed = PlacedLegs(self._counter, clock=lambda: self.now_s)

    def add(self, *workers) -> None:
        for worker in workers:
            self._placed.add("decode", worker)

    def values(self) -> dict[str, float]:
        [family] = self._counter.collect()
        return {sample.labels["worker"]: sample.value for sample in family.samples if sample.name == "legs_total"}


def test_workers_that_are_long_gone_have_no_series():
    legs = Legs()
    for number in range(300):
        # each is replaced by one of another name
        worker = candidates.worker(f"w{number}")
        legs.add(worker, worker)
        worker.mark_lost("replaced")
        legs.now_s += KEPT_S / 10
    assert legs.values() == {f"w{number}": 2 for number in range(289, 300)}
    legs.now_s += KEPT_S
    legs.add(candidates.worker("last"))
    assert legs.values() == {"last": 1}


def test_workers_that_live_and_those_that_come_back_keep_theirs():
    legs = Legs()
    idle, restarted, gone = (candidates.worker(name) for name in ("idle", "restarted", "gone"))
    legs.add(idle, restarted, gone)
    restarted.mark_lost("killed")
    gone.mark_lost("killed")
    legs.now_s += KEPT_S
    legs.add(candidates.worker("restarted"))
    legs.add(candidates.worker("new"))
    assert legs.values() == {"idle": 1, "restarted": 2, "gone": 1, "new": 1}
    legs.now_s += 1
    legs.add(candidates.worker("newer"))
    assert legs.values() == {"idle": 1, "restarted": 2, "new": 1, "newer": 1}
