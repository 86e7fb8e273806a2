"""Quantiles and ratios of the comparison of running streams with and without separate prefill and decode."""

from __future__ import annotations

from interference import SEPARATE, TOGETHER, figures_of, summary


def test_quantiles_are_of_intervals_between_tokens() -> None:
    figures = figures_of([n / 1e3 for n in range(200, -1, -1)], [0.3, 0.1, 0.2])
    assert figures == {"ITL p50": 100.0, "ITL p99": 198.0, "TTFT p50": 200.0, "tokens": 201}


def test_ratios_are_of_rounds_with_the_lowest_and_highest() -> None:
    rounds = {
        SEPARATE: [{"ITL p99": 4.0}, {"ITL p99": 6.0}, {"ITL p99": 5.0}],
        TOGETHER: [{"ITL p99": 8.0}, {"ITL p99": 8.0}, {"ITL p99": 20.0}],
    }
    result = summary(rounds)
    assert result["medians"] == {SEPARATE: {"ITL p99": 5.0}, TOGETHER: {"ITL p99": 8.0}}
    assert result["ratio, lowest, highest"] == {"ITL p99": [0.5, 0.25, 0.75]}
