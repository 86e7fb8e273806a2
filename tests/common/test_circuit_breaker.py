"""A breaker tries less and less often, and says each outage and each recovery once."""

from __future__ import annotations

import logging

import pytest

from pdserve.common.registry.circuit_breaker import LONGEST_WAIT_S, BreakerState, CircuitBreaker

log = logging.getLogger("breaker-test")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker("the thing", "others do it", log, clock)


def test_one_failure_is_no_outage(breaker: CircuitBreaker, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        breaker.failed("timeout", "late")
        assert breaker.allows
        breaker.succeeded()
    assert not caplog.records
    assert breaker.errors == {"timeout": 5}


def test_an_outage_and_its_end_are_one_line_each(
    breaker: CircuitBreaker, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    breaker.failed("unreachable", "nobody there")
    breaker.failed("unreachable", "nobody there")
    assert breaker.state is BreakerState.OPEN
    probes = 0
    for _ in range(1000):
        clock.now += 0.01
        if breaker.allows:
            assert breaker.state is BreakerState.HALF_OPEN
            probes += 1
            breaker.failed("unreachable", "nobody there")
            assert not breaker.allows
    assert 10 / (1.3 * LONGEST_WAIT_S) < probes < 20
    clock.now += 2 * LONGEST_WAIT_S
    assert breaker.allows
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert told[0] == "the thing cannot be used (unreachable: nobody there); others do it"
    assert told[1].startswith("the thing is back after 12.0")


def test_after_a_recovery_it_begins_anew(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(2):
        breaker.failed("timeout", "late")
        assert breaker.state is BreakerState.CLOSED
        breaker.failed("timeout", "late")
        assert not breaker.allows
        clock.now += 0.2
        assert breaker.allows
        breaker.succeeded()
