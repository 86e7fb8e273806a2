"""`FleetSearch`: the cheapest fleet that meets targets, of all with so many workers of each role."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.plan.targets import Target


class Size(NamedTuple):
    """Workers of each role; without prefill workers, decode workers compute prompts."""

    num_prefill: int
    num_decode: int

    def covers(self, other: Size) -> bool:
        """True if it has as many workers of each role, or more. A fleet without prefill workers is of another kind."""
        if bool(self.num_prefill) != bool(other.num_prefill):
            return False
        return self.num_prefill >= other.num_prefill and self.num_decode >= other.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill} prefill, {self.num_decode} decode"


@dataclass(frozen=True, slots=True)
class Trial:
    """What the clients of a fleet would see."""

    size: Size
    records: Sequence[RequestRecord]
    busy_s: float
    """Seconds in which all its workers together computed."""
    duration_s: float

    def values_s(self, targets: Sequence[Target]) -> tuple[float, ...]:
        return tuple(target.value_s(self.records) for target in targets)

    def meets(self, targets: Sequence[Target]) -> bool:
        return all(target.is_met(self.records) for target in targets)

    @property
    def use(self) -> float:
        """The part of its workers' time in which they computed."""
        num_workers = self.size.num_prefill + self.size.num_decode
        return self.busy_s / (num_workers * self.duration_s) if self.duration_s else 0.0


@dataclass(slots=True)
class FleetSearch:
    """Tries fleets in the order of their costs. What is smaller in both roles than a fleet that misses a target misses it, too."""

    attempt: Callable[[Size], Trial]
    targets: Sequence[Target]
    cost: Callable[[Size], float]
    max_workers: int
    trials: dict[Size, Trial] = field(default_factory=dict)
    _missed: list[Size] = field(default_factory=list)

    def cheapest(self) -> Trial | None:
        """None if no fleet of at most `max_workers` meets the targets."""
        bound = self._enough()
        if bound is None:
            return None
        for size in sorted(self._sizes(), key=lambda size: (self.cost(size), -size.num_prefill)):
            if self.cost(size) > self.cost(bound):
                break
            if any(missed.covers(size) for missed in self._missed):
                continue
            if self._meets(size):
                return self.trials[size]
        return self.trials[bound]

    def _sizes(self) -> Iterator[Size]:
        for num_workers in range(1, self.max_workers + 1):
            for num_prefill in range(num_workers):
                yield Size(num_prefill, num_workers - num_prefill)

    def _enough(self) -> Size | None:
        """A fleet that meets the targets, not much larger than needed: the cheapest one has at most its cost."""
        num_workers, least = 1, 0
        while True:
            met = self._met_at(num_workers)
            if met is not None:
                break
            if num_workers == self.max_workers:
                return None
            least, num_workers = num_workers, min(self.max_workers, 2 * num_workers)
        # between a number that did not do and one that did
        most = num_workers
        while most - least > 1:
            middle = (least + most) // 2
            if (smaller := self._met_at(middle)) is not None:
                met, most = smaller, middle
            else:
                least = middle
        return met

    def _met_at(self, num_workers: int) -> Size | None:
        """One of several ways to divide the workers among the roles that meets the targets, equal parts first."""
        middle = round(num_workers / 2)
        order = sorted(range(num_workers), key=lambda num_prefill: abs(num_prefill - middle))
        # with many workers only some of the ways; the others are tried at the end
        step = max(1, len(order) // 8)
        for num_prefill in [*order[::step], 0]:
            size = Size(num_prefill, num_workers - num_prefill)
            if not any(missed.covers(size) for missed in self._missed) and self._meets(size):
                return size
        return None

    def _meets(self, size: Size) -> bool:
        trial = self.trials.get(size)
        if trial is None:
            trial = self.trials[size] = self.attempt(size)
        if trial.meets(self.targets):
            return True
        self._missed.append(size)
        return False

    def frontier(self) -> list[Trial]:
        """Of the fleets that were tried, those for which no other one is as cheap and better in one target, by their cost."""
        found: list[tuple[tuple[float, ...], Trial]] = []
        valued = [(self.cost(trial.size), trial.values_s(self.targets), trial) for trial in self.trials.values()]
        for _, values, trial in sorted(valued, key=lambda each: each[:2]):
            if all(map(math.isinf, values)):
                continue
            if not any(all(map(operator.ge, values, others)) for others, _ in found):
                found.append((values, trial))
        return [trial for _, trial in found]
