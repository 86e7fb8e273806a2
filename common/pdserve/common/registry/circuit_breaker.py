"""`CircuitBreaker`: limits retries of an operation that fails, and logs its outage once."""

from __future__ import annotations

import enum
import logging
import random
from collections import Counter
from collections.abc import Callable

from pdserve.common import clock

FAILURES_TO_OPEN = 2
"""Consecutive failures: a single one may be a kept connection that the other side has closed."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 1.0


class BreakerState(enum.Enum):
    """CLOSED lets everything through, OPEN nothing, HALF_OPEN one probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


LEGAL_MOVES: dict[BreakerState, tuple[BreakerState, ...]] = {
    BreakerState.CLOSED: (BreakerState.OPEN,),
    BreakerState.OPEN: (BreakerState.HALF_OPEN,),
    BreakerState.HALF_OPEN: (BreakerState.CLOSED, BreakerState.OPEN),
}


class CircuitBreaker:
    """For one loop: `allows`, then `succeeded` or `failed`. Waits double from one probe to the next, jittered."""

    def __init__(
        self, name: str, meanwhile: str, log: logging.Logger, clock: Callable[[], float] = clock.monotonic
    ) -> None:
        """name: what fails, for the log. meanwhile: what its failure means for the service, a clause."""
        self.state = BreakerState.CLOSED
        self.errors: Counter[str] = Counter()
        """Failures since start, by kind."""
        self._name, self._meanwhile, self._log, self._clock = name, meanwhile, log, clock
        self._in_a_row = 0
        self._wait_s = FIRST_WAIT_S
        self._probe_at = 0.0
        self._since = 0.0

    @property
    def allows(self) -> bool:
        """True if to try now; in an outage this is the probe, and its outcome must be reported."""
        if self.state is BreakerState.OPEN and self._clock() >= self._probe_at:
            self._move(BreakerState.HALF_OPEN)
        return self.state is not BreakerState.OPEN

    def succeeded(self) -> None:
        self._in_a_row, self._wait_s = 0, FIRST_WAIT_S
        if self.state is BreakerState.HALF_OPEN:
            self._move(BreakerState.CLOSED)
            self._log.warning("%s is back after %.1f s", self._name, self._clock() - self._since)

    def failed(self, kind: str, message: str) -> None:
        """kind: a word for the metric. message: for the log, which gets one line an outage."""
        self.errors[kind] += 1
        self._in_a_row += 1
        if self.state is BreakerState.CLOSED:
            if self._in_a_row == 1:
                self._since = self._clock()
            if self._in_a_row < FAILURES_TO_OPEN:
                return
            self._log.warning("%s cannot be used (%s: %s); %s", self._name, kind, message, self._meanwhile)
        if self.state is not BreakerState.OPEN:
            self._move(BreakerState.OPEN)
        self._probe_at = self._clock() + self._wait_s * random.uniform(0.8, 1.2)
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s)

    def _move(self, state: BreakerState) -> None:
        if state not in LEGAL_MOVES[self.state]:
            raise RuntimeError(f"a breaker cannot go from {self.state.value} to {state.value}")
        self.state = state
