"""The doctor's report, as text and as JSON."""

from __future__ import annotations

from collections import Counter

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.doctor.finding import Examined, Finding, Verdict

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "bold red"}
_NAME_WIDTH = 10


class Report(msgspec.Struct, frozen=True):
    """The report that `--json` prints."""

    role: str
    verdict: Verdict
    """The worst verdict of all findings; OK if there are none."""
    checks: list[Examined]


def make_report(role: str, checks: list[Examined]) -> Report:
    counts = _counts(checks)
    return Report(role, next((one for one in (Verdict.FAILED, Verdict.WARNING) if counts[one]), Verdict.OK), checks)


def show(console: Console, examined: Examined) -> None:
    """Print a line per finding, and the advice below it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_NAME_WIDTH, no_wrap=True)
    table.add_column(width=len(Verdict.WARNING.value), no_wrap=True)
    table.add_column(overflow="fold")
    for number, finding in enumerate(examined.findings):
        name = Text("" if number else examined.check, style="bold")
        table.add_row(name, Text(finding.verdict.value, style=_STYLES[finding.verdict]), _text(finding))
    console.print(table)


def show_summary(console: Console, report: Report) -> None:
    """Print the last line."""
    counts = _counts(report.checks)
    summary = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    console.print(Text(f"{report.role}: {summary}", style=_STYLES[report.verdict]))


def _counts(checks: list[Examined]) -> Counter[Verdict]:
    return Counter(finding.verdict for examined in checks for finding in examined.findings)


def _text(finding: Finding) -> Text:
    # text, not markup: a path or an error may contain brackets
    text = Text(finding.what)
    if finding.advice:
        text.append(f"\n-> {finding.advice}", style="dim")
    return text
