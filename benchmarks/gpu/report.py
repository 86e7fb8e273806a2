"""The table of a run: rows by stage, then the goals, then the stages that ended early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpu.plan import GOALS, STAGES, Goal
from gpu.rows import Row

_HIDDEN = ("stage", "dry", "goal", "took_s")
_WIDTH = 46
"""Characters of a cell, at most."""


def line(row: Row) -> str:
    """One row, for the terminal."""
    values = " ".join(f"{name}={_text(value)}" for name, value in row.items() if name not in (*_HIDDEN, "case"))
    return f"{row['stage']:17} {row['case']:38} {values}"


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """All that a run of these stages found. A dry run's begins by saying that nothing was measured."""
    parts = []
    if any(row["dry"] for row in rows):
        parts.append("DRY RUN on a CPU with tiny shapes: it proves that every stage runs. Nothing was measured.\n")
    for stage in STAGES:
        own = [row for row in rows if row["stage"] == stage.name and "took_s" not in row]
        if own:
            parts.append(f"{stage.name}: {stage.title}\n{_columns(own)}")
    parts.append("goals\n" + "\n".join(_goal_lines(rows)) + "\n")
    if troubles := list(_troubles(rows, names)):
        parts.append("not in order\n" + "\n".join(troubles) + "\n")
    return "\n".join(parts)


def is_in_order(rows: Sequence[Row], names: Sequence[str]) -> bool:
    """True if each of these stages ran to its end, nothing failed, and every check passed. A missed goal is no failure."""
    return not list(_troubles(rows, names))


def _columns(rows: Sequence[Row]) -> str:
    """Rows with equal fields share columns."""
    out: list[str] = []
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(name for name in row if name not in _HIDDEN), []).append(row)
    for names, group in groups.items():
        cells = [list(names), *([_text(row[name])[:_WIDTH] for name in names] for row in group)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
        out += [
            "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
    return "\n".join(out) + "\n"


def _goal_lines(rows: Sequence[Row]) -> Iterator[str]:
    for goal in GOALS.values():
        judged = [row for row in rows if row.get("goal") == goal.name and row.get("met") is not None]
        bound = f"{'at least' if goal.at_least else 'at most'} {goal.bound:g}"
        yield f"  {goal.text}: {bound}: {_outcome(goal, judged)}"


def _outcome(goal: Goal, judged: Sequence[Row]) -> str:
    if not judged:
        return "not measured"
    worst = (min if goal.at_least else max)(judged, key=lambda row: row["ratio"])
    met = sum(row["met"] for row in judged)
    return f"{'MET' if met == len(judged) else 'MISSED'} in {met} of {len(judged)}, worst {worst['ratio']:.3g} ({worst['case']})"


def _troubles(rows: Sequence[Row], names: Sequence[str]) -> Iterator[str]:
    for row in rows:
        if "failed" in row:
            yield f"  {row['stage']}, {row['case']}: {row['failed']}"
        elif row.get("ok") is False:
            yield f"  {row['stage']}, {row['case']}: wrong result"
    for name in names:
        if not any(row["stage"] == name and "took_s" in row for row in rows):
            yield f"  {name}: not begun"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
