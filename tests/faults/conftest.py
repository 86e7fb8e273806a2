"""The table of the kill matrix, printed after the run, and the order of tests that run in several processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.faults.worker_matrix")


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


_FAULT = "fault"
_LONGEST = "test_soak.py"


@pytest.fixture
def matrix_rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Rows of one test."""
    rows: list[Row] = []
    yield rows
    request.node.user_properties += [(_FAULT, asdict(row)) for row in rows]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` all cells of a cluster run in one process; what takes longest begins first."""
    if not config.getoption("loadgroup", False):
        return
    here = Path(__file__).parent
    groups = {item: _cluster_of(item) for item in items if here in item.path.parents}
    for item, group in groups.items():
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (item.path.name != _LONGEST, not groups.get(item)))


def _cluster_of(item: pytest.Item) -> str:
    """The cluster that a test shares with others of its file; empty without one."""
    if "matrix" not in getattr(item, "fixturenames", ()):
        return ""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return f"{item.path.stem} {params.get('matrix', '')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        Row(**value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, value in report.user_properties
        if name == _FAULT
    ]
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
