"""`ReportFiles`: where the results of a run are written, verified before it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.cli.bench.report import as_html, as_json, plots, write_plots
from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.bench.summary import Summary
from pdserve.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """None: not written."""

    json_file: Path | None = None
    html_file: Path | None = None
    plots_folder: Path | None = None

    def prepare(self) -> None:
        """Report an absent library or what cannot be written before the run, not after it. Raises: ConfigError."""
        for flag, file in (("--json", self.json_file), ("--html", self.html_file)):
            if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
                raise ConfigError(f"{flag} is {file}, which cannot be written")
        if self.html_file or self.plots_folder:
            plots([])
        if self.plots_folder is not None:
            try:
                self.plots_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--plots is {self.plots_folder}, which cannot be made: {error.strerror}") from error

    def write(
        self,
        summary: Summary,
        conditions: dict[str, Any],
        records: Sequence[RequestRecord],
        *,
        saves_requests: bool,
        pictures: Mapping[str, bytes] = {},
    ) -> None:
        """pictures: name -> PNG, of more than requests. Raises: ConfigError."""
        if self.json_file is not None:
            write_report(self.json_file, as_json(summary, conditions, records if saves_requests else None))
        if self.html_file or self.plots_folder:
            drawn = plots(records) | dict(pictures)
            if self.html_file is not None:
                write_report(self.html_file, as_html(summary, conditions, drawn))
            if self.plots_folder is not None:
                write_plots(drawn, self.plots_folder)


def write_report(path: Path, content: str) -> None:
    """Raises: ConfigError."""
    try:
        path.write_text(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
