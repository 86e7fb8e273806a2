"""What a worker says of its speed: recent, weighted by time, and nothing when it is old."""

from __future__ import annotations

import pytest

from pdserve.worker.prefill_rate import HALF_LIFE_S, KEPT_S, PrefillRate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_before_the_first_prompt() -> None:
    rate = PrefillRate(Clock())
    assert rate.tokens_per_s == 0
    rate.add(0, 1.0)
    assert rate.tokens_per_s == 0


def test_the_latest_weighs_most() -> None:
    rate = PrefillRate(Clock())
    rate.add(1000, 1.0)
    assert rate.tokens_per_s == 1000
    rate.add(4000, 1.0)
    assert 2500 < rate.tokens_per_s < 4000
    rate.add(40 * int(HALF_LIFE_S) * 100, 40 * HALF_LIFE_S)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.01)


def test_a_worker_that_was_stopped_once_is_not_slow_for_ever() -> None:
    clock = Clock()
    rate = PrefillRate(clock)
    rate.add(32, 12.0)
    assert rate.tokens_per_s < 3
    clock.now += KEPT_S
    assert rate.tokens_per_s == 0
    rate.add(1000, 1.0)
    assert rate.tokens_per_s == 1000, "what was forgotten weighs nothing"
