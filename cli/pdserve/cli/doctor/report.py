"""The doctor's report, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

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
    """The worst verdict of all findings."""
    checks: list[Examined]


def make_report(role: str, checks: list[Examined]) -> Report:
    return Report(role, worst(checks), checks)


def worst(checks: Sequence[Examined]) -> Verdict:
    """The worst verdict of all findings; OK if there are none."""
    found = {finding.verdict for examined in checks for finding in examined.findings}
    return next((verdict for verdict in (Verdict.FAILED, Verdict.WARNING) if verdict in found), Verdict.OK)


def show(console: Console, examined: Examined) -> None:
    """Print one line per finding, with the advice below it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_NAME_WIDTH, no_wrap=True)
    table.add_column(width=len(Verdict.WARNING.value), no_wrap=True)
    table.add_column(overflow="fold")
    for number, finding in enumerate(examined.findings):
        name = "" if number else examined.check
        table.add_row(
            Text(name, style="bold"), Text(finding.verdict.value, style=_STYLES[finding.verdict]), _text(finding)
        )
    console.print(table)


def show_summary(console: Console, report: Report) -> None:
    """Print the last line."""
    counts = {
        verdict: sum(finding.verdict is verdict for examined in report.checks for finding in examined.findings)
        for verdict in Verdict
    }
    told = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items())
    console.print(Text(f"{report.role}: {told}", style=_STYLES[report.verdict]))


def _text(finding: Finding) -> Text:
    # text, not markup: a path or an error may contain brackets
    text = Text(finding.what)
    if finding.advice:
        text.append(f"\n-> {finding.advice}", style="dim")
    return text
