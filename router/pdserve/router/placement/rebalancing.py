"""`Rebalancing`: moves running sequences from a hot decode worker to an idle one.

The slowest streams of a fleet are those of the worker with the longest steps, so they decide about its p99 of the time between two
tokens. How long a step takes with n sequences is a line through the steps that have been seen:

    step(n) = a + b * n        b from this worker's steps, or from those of all alike if its own do not differ in n
    gain(k) = step(n) here - the longer of step(n - k) here and step(m + k) at the worker with m sequences

k sequences move if the gain is at least a tenth of the step, and if what it saves until their ends is more than the pause of a
move. How many tokens are left is not known; the best guess is as many as they have.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pdserve.common import clock
from pdserve.router.workers.step_times import StepTimes
from pdserve.router.workers.worker import RemoteWorker, WorkerState

LOOK_EVERY_S = 0.25
ALWAYS_EVERY_S = 0.02
"""Between two moves with `rebalance` `always`."""
SETTLE_S = 2.5
"""After a move, until the reports of both workers count what has moved."""
LEAST_GAIN = 0.1
"""Of the step here."""
MOST_AT_ONCE = 4
FIRST_PAUSE_S = 0.05
"""Of a moved sequence, before the first measurement."""
_KEPT = 0.8


class Rebalance(NamedTuple):
    """Move so many sequences between these workers."""

    source: RemoteWorker
    num_sequences: int
    gain_s: float
    """Per token of the slowest streams."""


class Rebalancing:
    """One router's. `run` it."""

    def __init__(
        self, setting: Literal["never", "auto", "always"], decode_workers: Callable[[], Sequence[RemoteWorker]]
    ) -> None:
        """setting: `rebalance`. decode_workers: returns the live ones."""
        self._setting = setting
        self._workers = decode_workers
        self._pause_s = FIRST_PAUSE_S
        self._settled_at = 0.0

    def paused(self, seconds: float) -> None:
        """A sequence has moved, with this pause."""
        self._pause_s = _KEPT * self._pause_s + (1 - _KEPT) * seconds

    async def run(self) -> None:
        """Look for moves until cancelled."""
        while True:
            await asyncio.sleep(ALWAYS_EVERY_S if self._setting == "always" else LOOK_EVERY_S)
            workers = [worker for worker in self._workers() if worker.state is WorkerState.LIVE]
            if len(workers) < 2:
                continue
            if self._setting == "always":
                movable = [each for worker in workers for each in worker.movable]
                if movable:
                    random.choice(movable).move()
                continue
            for worker in workers:
                worker.time_steps()
            if clock.monotonic() >= self._settled_at and (found := self.find(workers)) is not None:
                self._settled_at = clock.monotonic() + SETTLE_S
                for each in random.sample(
                    list(found.source.movable), min(found.num_sequences, len(found.source.movable))
                ):
                    each.move()

    def find(self, workers: Sequence[RemoteWorker]) -> Rebalance | None:
        """The best move; None if none pays."""
        pooled = StepTimes()
        for worker in workers:
            pooled = pooled.with_steps_of(worker.step_times)
        best: Rebalance | None = None
        for source in workers:
            for target in workers:
                if target is not source and not target.identity.layout.differences(source.identity.layout):
                    found = self._between(source, target, pooled)
                    if found is not None and (best is None or found.gain_s > best.gain_s):
                        best = found
        return best

    def _between(self, source: RemoteWorker, target: RemoteWorker, pooled: StepTimes) -> Rebalance | None:
        here, there = source.load.num_running, target.load.num_running
        costs = [_per_sequence_s(worker.step_times, pooled) for worker in (source, target)]
        before = source.step_times.predicted_s(here, costs[0])
        most = min(MOST_AT_ONCE, (here - there) // 2, len(source.movable))
        if before is None or most < 1:
            return None
        found: Rebalance | None = None
        for count in range(1, most + 1):
            left = source.step_times.predicted_s(here - count, costs[0]) or 0.0
            # one without steps so far is thought to be like the source
            times = target.step_times if target.step_times.are_known else source.step_times
            joined = times.predicted_s(there + count, costs[1]) or 0.0
            gain = before - max(left, joined)
            if found is None or gain > found.gain_s:
                found = Rebalance(source, count, gain)
        if found is None or found.gain_s < LEAST_GAIN * before:
            return None
        num_tokens = sum(each.num_output_tokens for each in source.movable) / len(source.movable)
        return found if found.gain_s * num_tokens > self._pause_s else None


def _per_sequence_s(own: StepTimes, pooled: StepTimes) -> float:
    per_sequence = own.per_sequence_s
    return (pooled.per_sequence_s or 0.0) if per_sequence is None else per_sequence
