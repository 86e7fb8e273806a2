"""A plug-in of pytest: one row per test file, and one per failed test, in the file that `GPU_ROWS` names."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from gpu.rows import Rows


def pytest_configure(config: pytest.Config) -> None:
    # A process of xdist reports to the one that writes rows. Its environment does not say which one it is: a test that runs
    # under xdist may have started this whole run.
    if not hasattr(config, "workerinput"):
        rows = Rows(Path(os.environ["GPU_ROWS"]), "kernel_contract", dry=os.environ["GPU_DRY"] == "1")
        config.pluginmanager.register(RowsPlugin(rows), "gpu-rows")


class RowsPlugin:
    """Hooks of the process that writes rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._counts: dict[str, Counter[str]] = {}
        """Outcomes per file."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        counts = self._counts.setdefault(report.nodeid.partition("::")[0], Counter())
        counts[report.outcome] += 1
        if report.failed and counts["failed"] <= 5:
            name = report.nodeid.partition("::")[2]
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(getattr(crash, "message", report.longrepr)).strip().splitlines()
            self._rows.fail(name[:100], (text or [""])[0][:160])

    def pytest_sessionfinish(self) -> None:
        for file, counts in sorted(self._counts.items()):
            passed, failed, skipped = (counts[outcome] for outcome in ("passed", "failed", "skipped"))
            self._rows.check(
                file.removeprefix("tests/"),
                failed == 0 and passed > 0,
                passed=passed,
                failures=failed,
                left_out=skipped,
            )
