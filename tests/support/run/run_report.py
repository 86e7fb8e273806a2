"""A pytest plugin: the table of the slowest files at the end of a run, one that was interrupted included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

NUM_ROWS = 25
SHORTEST_RUN_S = 30.0
"""Seconds of all tests together below which no table is printed."""


@dataclass(slots=True)
class FileTime:
    """Seconds of one file's tests with their fixtures."""

    file: str
    seconds: float = 0.0
    num_tests: int = 0
    longest_s: float = 0.0
    longest: str = ""
    """The part of the name after the file's, for the longest test."""


def file_times(reports: Iterable[pytest.TestReport]) -> list[FileTime]:
    """The longest first."""
    tests: dict[str, float] = {}
    for report in reports:
        tests[report.nodeid] = tests.get(report.nodeid, 0.0) + report.duration
    files: dict[str, FileTime] = {}
    for nodeid, seconds in tests.items():
        file, _, name = nodeid.partition("::")
        time = files.setdefault(file, FileTime(file))
        time.seconds += seconds
        time.num_tests += 1
        if seconds >= time.longest_s:
            time.longest_s, time.longest = seconds, name
    return sorted(files.values(), key=lambda time: -time.seconds)


def reports_of(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    """All reports of the run so far, those of set-up and tear-down with them."""
    return [
        report
        for same_outcome in reporter.stats.values()
        for report in same_outcome
        if isinstance(report, pytest.TestReport)
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    times = file_times(reports_of(terminalreporter))
    total_s = sum(time.seconds for time in times)
    if total_s < SHORTEST_RUN_S:
        return
    terminalreporter.section(f"slowest of {len(times)} files, {total_s:.0f} s in all")
    terminalreporter.line("seconds tests  file (seconds of its longest test, and that test)")
    for time in times[:NUM_ROWS]:
        longest = f"({time.longest_s:.1f} {time.longest})"
        terminalreporter.line(f"{time.seconds:7.1f} {time.num_tests:5}  {time.file} {longest}")
