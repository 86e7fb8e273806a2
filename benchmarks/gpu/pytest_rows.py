"""A plug-in of pytest: one row per test file, and one per failed test, in the file that `GPU_ROWS` names."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from gpu.rows import Rows

_counts: dict[str, Counter[str]] = {}


def _rows() -> Rows | None:
    """None in a process of xdist, which reports to the one that has rows."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return None
    return Rows(Path(os.environ["GPU_ROWS"]), "kernel_contract", dry=os.environ["GPU_DRY"] == "1")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    rows = _rows()
    if rows is None or (report.when != "call" and report.passed):
        return
    counts = _counts.setdefault(report.nodeid.partition("::")[0], Counter())
    counts[report.outcome] += 1
    if report.failed and counts["failed"] <= 5:
        name = report.nodeid.partition("::")[2]
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(getattr(crash, "message", report.longrepr)).strip().splitlines()
        rows.fail(name[:100], (text or [""])[0][:160])


def pytest_sessionfinish() -> None:
    rows = _rows()
    if rows is None:
        return
    for file, counts in sorted(_counts.items()):
        passed, failed, skipped = (counts[outcome] for outcome in ("passed", "failed", "skipped"))
        rows.check(
            file.removeprefix("tests/"), failed == 0 and passed > 0, passed=passed, failures=failed, left_out=skipped
        )
