"""The table of the kill matrix, printed after the run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Row:
    """One fault and what came of it."""

    phase: str
    victim: str
    way: str
    answered_s: float
    """From the signal to the last token of the last request."""
    attempts: int
    """Attempts of all requests together, above one each."""


ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture
def matrix_rows(request: pytest.FixtureRequest) -> list[Row]:
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("faults survived")
    terminalreporter.write_line(
        f"{'phase':<10} {'victim':<8} {'signal':<10} {'answered after':>14} {'new attempts':>12}"
    )
    for row in rows:
        terminalreporter.write_line(
            f"{row.phase:<10} {row.victim:<8} {row.way:<10} {row.answered_s:>12.2f} s {row.attempts:>12}"
        )
