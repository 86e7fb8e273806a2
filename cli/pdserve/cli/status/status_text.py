"""Parts of the terminal views `pdserve top` and `pdserve trace`: numbers with units, bars and waterfalls."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pdserve.cli.status.status_client import plain
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.router.telemetry.status_view import PhaseView, RequestView

_STYLES = {"router": "blue", "prefill": "yellow", "decode": "green"}
_FILLS = {"router": "░", "prefill": "▓", "decode": "█"}
"""Readable also where colours are not, as in a file."""


def count(value: float) -> str:
    """A number in at most five characters and its prefix."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def by_source(tokens: CachedTokens | None) -> str:
    """As `64 pool, 32 peer`: the sources that had some; empty without any."""
    found = {} if tokens is None else tokens.by_source()
    return ", ".join(f"{count(number)} {source}" for source, number in found.items() if number)


def seconds(value: float | None) -> str:
    """A time with its unit; a dash for None."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:.2f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 90 else f"{value / 60:.1f} min" if value < 5400 else f"{value / 3600:.1f} h"


def meter(value: float, total: float, width: int) -> Text:
    """A bar of this many columns, filled in proportion."""
    filled = min(width, round(width * value / total)) if total > 0 else 0
    style = "red" if total > 0 and value >= 0.9 * total else "green"
    return Text("█" * filled, style=style) + Text("░" * (width - filled), style="dim")


def outcome(request: RequestView) -> Text:
    """A finish reason, an error's code, or `under way`."""
    if not request.outcome:
        return Text("under way", style="yellow")
    return Text(plain(request.outcome), style="green" if request.outcome in ("stop", "length") else "red")


def one_line_waterfall(request: RequestView, width: int) -> Text:
    """The phases of the critical path, one after the other."""
    path = [phase for phase in request.phases if not phase.overlaps]
    if not path or request.duration_s <= 0:
        return Text("")
    line = Text()
    for phase in path:
        until = round(width * min(1.0, (phase.start_s + phase.duration_s) / request.duration_s))
        line.append(_FILLS.get(phase.service, "░") * (until - len(line)), style=_STYLES.get(phase.service, "blue"))
    return line


def legend() -> Text:
    """The fill of each service in `one_line_waterfall`."""
    return Text("   ").join(Text(f"{fill} {service}", style=_STYLES[service]) for service, fill in _FILLS.items())


def waterfall(request: RequestView, width: int) -> Table:
    """A row per phase. width: columns of the terminal."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase", no_wrap=True)
    table.add_column("service", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    columns = max(0, min(60, width - 50))
    table.add_column("when" if columns >= 8 else "", no_wrap=True)
    for phase in request.phases:
        share = phase.duration_s / request.duration_s if request.duration_s > 0 else 0.0
        table.add_row(
            Text(plain(phase.name).replace("_", " ")),
            Text(plain(phase.service), style=_STYLES.get(phase.service, "")),
            seconds(phase.duration_s),
            "overlaps" if phase.overlaps else f"{share:.0%}",
            _bar(phase, request.duration_s, columns) if columns >= 8 else Text(""),
        )
    return table


def _bar(phase: PhaseView, total_s: float, columns: int) -> Text:
    if total_s <= 0:
        return Text("")
    left = min(columns - 1, max(0, round(columns * phase.start_s / total_s)))
    width = min(columns - left, max(1, round(columns * phase.duration_s / total_s)))
    return Text(" " * left + ("▒" if phase.overlaps else "█") * width, style=_STYLES.get(phase.service, "blue"))
