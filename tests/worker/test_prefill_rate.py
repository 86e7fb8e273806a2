"""What a worker says of its speed: recent, apart from what a step costs anyway, and what it was at start when that is old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


AT_START = [(32, 0.008), (128, 0.0176), (512, 0.056)]
"""5 ms a step, and 10,000 tokens a second."""


def test_steps_of_several_sizes_tell_a_step_from_its_tokens() -> None:
    rate = PrefillRate(Clock())
    assert rate.step_s == 0
    rate.calibrate(AT_START)
    assert (rate.tokens_per_s, rate.step_s) == (pytest.approx(10_000, rel=0.01), pytest.approx(0.0048, rel=0.01))


def test_ends_of_cached_prompts_do_not_look_slow() -> None:
    rate = PrefillRate(Clock())
    rate.calibrate(AT_START)
    for _ in range(1000):
        rate.add(7, 0.0075)
    assert 5_000 < rate.tokens_per_s <= 20_000, "7 tokens in 7.5 ms are not 933 a second"
    assert rate.step_s == pytest.approx(0.007, rel=0.1)


def test_a_worker_that_has_become_slower_says_so_and_is_believed_for_a_while() -> None:
    clock = Clock()
    rate = PrefillRate(clock)
    rate.calibrate(AT_START)
    for _ in range(100):
        rate.add(512, 0.200)
    assert 2_000 < rate.tokens_per_s < 4_000
    clock.now += KEPT_S
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.01)


SAMPLES = st.lists(st.tuples(st.integers(1, 8192), st.floats(1e-6, 100.0)), max_size=30)


def test_small_steps_that_took_longer_than_large_ones_at_start_are_noise() -> None:
    rate = PrefillRate(Clock())
    rate.calibrate([(32, 0.050), (128, 0.004), (512, 0.010)])
    assert rate.tokens_per_s == pytest.approx(10 * 672 / 0.064)


@given(SAMPLES, SAMPLES)
def test_whatever_was_measured_the_answer_is_a_speed(
    at_start: list[tuple[int, float]], samples: list[tuple[int, float]]
) -> None:
    rate = PrefillRate(Clock())
    rate.calibrate(at_start)
    for num_tokens, seconds in samples:
        rate.add(num_tokens, seconds)
    assert (rate.tokens_per_s == 0) == (not at_start and not samples)
    assert rate.tokens_per_s < float("inf")
    assert 0 <= rate.step_s <= 100.0
