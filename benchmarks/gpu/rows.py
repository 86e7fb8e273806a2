"""`Rows`: what a stage found, one JSON object per line, written as soon as it is known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.plan import GOALS

Row = dict[str, Any]

TIMED = ("_s", "_ms", "_us", "_tb_s", "_gb_s", "_tflops", "ratio", "requests_per_s")
"""Ends of the names of fields that come from a clock. In a dry run they are null."""


def is_timed(name: str) -> bool:
    return name.endswith(TIMED)


class Rows:
    """Appends to one file; several processes may do so, since a row is one short write."""

    def __init__(self, path: Path, stage: str, *, dry: bool) -> None:
        self.path = path
        self._stage = stage
        self._dry = dry

    def add(self, case: str, **values: Any) -> None:
        """case: what was measured or checked. A field that is not a number becomes null. Raises: ValueError for a time of a dry
        run, which would look like a measurement."""
        row = {"stage": self._stage, "case": case, "dry": self._dry}
        row |= {name: _plain(value) for name, value in values.items()}
        if self._dry and (timed := [name for name, value in row.items() if is_timed(name) and value is not None]):
            raise ValueError(f"{self._stage}, {case}: a dry run measures no {', '.join(timed)}")
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def judge(self, case: str, goal: str, ratio: float, **values: Any) -> None:
        """Add a row whose `ratio` has a goal. A ratio that is not a number, as in a dry run, is not judged."""
        met = None if math.isnan(ratio) else GOALS[goal].met(ratio)
        self.add(case, **values, ratio=ratio, goal=goal, met=met)

    def check(self, case: str, ok: bool, **values: Any) -> None:
        """Add a row about correctness: False fails the run."""
        self.add(case, ok=ok, **values)

    def skip(self, case: str, reason: str) -> None:
        self.add(case, skipped=reason)

    def fail(self, case: str, error: str) -> None:
        self.add(case, failed=error)


def read_rows(path: Path) -> list[Row]:
    """All complete rows of a file; none if there is no file."""
    return list(_rows(path)) if path.exists() else []


def _rows(path: Path) -> Iterator[Row]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
