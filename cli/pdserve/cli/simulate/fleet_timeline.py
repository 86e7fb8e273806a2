"""`FleetTimeline`: queues and pools of a simulated fleet by time."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

from pdserve.cli.bench.report import new_figure, png
from pdserve.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A service at some moment. The router has requests that wait for a place, and running ones; it has no blocks."""

    time_s: float
    service: str
    role: str
    running: int
    waiting: int
    blocks_in_use: int
    blocks_total: int


@dataclass(slots=True)
class FleetTimeline:
    """Rows are noted each `every_s` virtual seconds."""

    every_s: float = 1.0
    rows: list[TimelineRow] = field(default_factory=list)

    def as_csv(self) -> str:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow([each.name for each in fields(TimelineRow)])
        writer.writerows(astuple(row) for row in self.rows)
        return text.getvalue()

    def write(self, path: Path) -> None:
        """Raises: ConfigError."""
        try:
            path.write_text(self.as_csv())
        except OSError as error:
            raise ConfigError(f"--timeline is {path}, which cannot be written: {error.strerror}") from error

    def picture(self) -> bytes:
        """PNG of running and waiting requests, and of the pools' use, by role. Raises: ConfigError without matplotlib."""
        figure = new_figure()
        running, waiting, pools = figure.subplots(1, 3)
        for role, color in (("router", "C0"), ("prefill", "C1"), ("decode", "C2")):
            times, rows = self._of(role)
            running.plot(times, [sum(row.running for row in each) for each in rows], color, label=role)
            waiting.plot(times, [sum(row.waiting for row in each) for each in rows], color, label=role)
            if role != "router":
                in_use = [sum(row.blocks_in_use for row in each) for each in rows]
                total = [sum(row.blocks_total for row in each) or 1 for each in rows]
                pools.plot(times, [some / of for some, of in zip(in_use, total, strict=True)], color, label=role)
        running.set(title="running", xlabel="s", ylabel="requests")
        waiting.set(title="waiting", xlabel="s", ylabel="requests")
        pools.set(title="blocks in use", xlabel="s", ylabel="part of the pools", ylim=(0, 1))
        running.legend()
        return png(figure)

    def _of(self, role: str) -> tuple[list[float], list[Sequence[TimelineRow]]]:
        by_time: dict[float, list[TimelineRow]] = {}
        for row in self.rows:
            if row.role == role:
                by_time.setdefault(row.time_s, []).append(row)
        return list(by_time), list(by_time.values())
