"""A request's timeline as text: one row per phase, with its start and length as a bar."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pdserve.cli.grpc_client import Delta
from pdserve.common import timeline
from pdserve.common.timeline import Timeline

BAR_WIDTH = 40
WIDE = 120
"""Columns of a terminal from which the meanings of the phases are shown beside the bars."""


def timeline_table(last: Delta, width: int) -> Table:
    """Phases of the request whose last message is `last`. width: columns of the terminal; below `WIDE` without meanings."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("when", no_wrap=True)
    with_meaning = width >= WIDE
    if with_meaning:
        table.add_column("", no_wrap=True)
    moments = last.timeline.moments_unix_ns
    total = last.timeline.seconds(timeline.ARRIVED, timeline.FINISHED)
    for phase, seconds in last.timeline.phases():
        bar = _bar(moments[phase.start], moments[phase.end], last.timeline, total)
        meaning = [Text(phase.meaning, style="dim")] if with_meaning else []
        table.add_row(phase.name, f"{seconds * 1e3:.2f}", bar, *meaning)
    return table


def summary(last: Delta) -> str:
    """One line: tokens, TTFT, TPOT."""
    parts = [f"{last.num_prompt_tokens} prompt tokens ({last.num_cached_tokens} cached), {last.num_output_tokens} new"]
    if (ttft_s := last.timeline.ttft_s) is not None:
        parts.append(f"first token after {ttft_s * 1e3:.1f} ms")
    if (tpot_s := last.timeline.tpot_s(last.num_output_tokens)) is not None:
        parts.append(f"then {tpot_s * 1e3:.2f} ms a token")
    return ", ".join(parts)


def _bar(start_ns: int, end_ns: int, times: Timeline, total_s: float | None) -> Text:
    first = times.moments_unix_ns.get(timeline.ARRIVED)
    if first is None or not total_s:
        return Text("")
    scale = BAR_WIDTH / (total_s * 1e9)
    left = min(BAR_WIDTH - 1, max(0, round((start_ns - first) * scale)))
    width = min(BAR_WIDTH - left, max(1, round((end_ns - start_ns) * scale)))
    return Text(" " * left + "█" * width, style="green")
