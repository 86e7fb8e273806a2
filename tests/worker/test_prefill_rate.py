"""A worker's reported speed: recent, apart from a step's fixed cost, and the value at start when that is old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.worker.prefill_rate import KEPT_S, PrefillRate


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
    rate.add(1000, 0.25)
    assert 1600 < rate.tokens_per_s < 4000
    for _ in range(40):
        rate.add(1000, 10.0)
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


STEPS = [(32, 0.008), (128, 0.0176), (512, 0.056)]
"""5 ms a step, and 10,000 tokens a second."""


def test_steps_of_several_sizes_tell_a_step_from_its_tokens() -> None:
    rate = PrefillRate(Clock())
    for num_tokens, seconds in STEPS * 3:
        rate.add(num_tokens, seconds)
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.02)


def test_ends_of_cached_prompts_among_others_do_not_look_slow() -> None:
    rate = PrefillRate(Clock())
    for _ in range(20):
        rate.add(512, 0.0562)
        for _ in range(10):
            rate.add(7, 0.0057)
    assert 9_000 < rate.tokens_per_s < 11_000, "7 tokens in 5.7 ms are not 1,228 a second"


def test_large_steps_that_took_no_longer_than_small_ones_are_noise() -> None:
    rate = PrefillRate(Clock())
    for num_tokens, seconds in ((512, 0.01), (32, 0.05), (128, 0.04)) * 2:
        rate.add(num_tokens, seconds)
    assert rate.tokens_per_s == pytest.approx(10 * 672 / 0.1, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(1e-6, 100.0)), max_size=30))
def test_whatever_was_measured_the_answer_is_a_speed(samples: list[tuple[int, float]]) -> None:
    rate = PrefillRate(Clock())
    for num_tokens, seconds in samples:
        rate.add(num_tokens, seconds)
    assert (rate.tokens_per_s == 0) == (not samples)
    assert rate.tokens_per_s < float("inf")
