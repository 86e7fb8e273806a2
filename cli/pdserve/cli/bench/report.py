"""Results of a run as a table for the terminal, JSON, an HTML page and PNG plots."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.bench.summary import LATENCIES, PERCENTILES, TITLES, Latencies, Summary
from pdserve.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-bottom: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: .3rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; background: white; }
"""


def tables(summary: Summary) -> list[Table]:
    """Tables for the terminal: counts and rates, then latencies."""
    totals = Table(show_header=False, box=None)
    for label, value in total_rows(summary):
        totals.add_row(label, value)
    latencies = Table("milliseconds", *(f"p{part}" for part in PERCENTILES), "mean", "max", box=None)
    for column in latencies.columns[1:]:
        column.justify = "right"
    for name in LATENCIES:
        latencies.add_row(*latency_row(summary, name))
    return [totals, latencies]


def total_rows(summary: Summary) -> list[tuple[str, str]]:
    figures = summary.figures()
    rows = [
        (
            "requests",
            f"{summary.completed} answered, {sum(summary.failures.values())} failed, in {summary.duration_s:.1f} s",
        ),
        *((f"  failed: {kind}", str(count)) for kind, count in summary.failures.items()),
        ("tokens", f"{summary.input_tokens} in, {summary.output_tokens} out"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        ("output tokens/s", f"{figures['output_throughput']:.1f}"),
    ]
    if summary.cached_tokens is not None:
        rows.append(("cached prompt tokens", str(summary.cached_tokens)))
    if summary.good is not None:
        rows.append(
            (
                "goodput, requests/s",
                f"{figures['request_goodput']:.2f} ({summary.good} of {summary.completed} met the targets)",
            )
        )
    if summary.late_s > 0:
        rows.append(("longest delay of sending", f"{summary.late_s * 1e3:.1f} ms"))
    return rows


def latency_row(summary: Summary, name: str) -> list[str]:
    values = summary.distributions[name]
    cells = [*(values.percentiles[part] for part in PERCENTILES), values.mean, values.most]
    return [f"{TITLES[name]} ({name.upper()})", *("-" if value is None else f"{value:.2f}" for value in cells)]


def as_json(summary: Summary, conditions: dict[str, Any], records: Sequence[RequestRecord] | None) -> str:
    """Encode results; records: also each request, None for none."""
    content: dict[str, Any] = {"conditions": conditions, **summary.figures(), "failures": summary.failures}
    if records is not None:
        content["requests"] = [
            {
                "name": record.name,
                "scheduled_s": record.scheduled_s,
                "sent_s": record.sent_s,
                "ended_s": record.ended_s,
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "cached_tokens": record.cached_tokens,
                "error": record.error,
                "chunk_s": record.chunk_s,
            }
            for record in records
        ]
    return json.dumps(content, indent=1) + "\n"


def as_html(summary: Summary, conditions: dict[str, Any], pictures: Mapping[str, bytes]) -> str:
    """One page without further files: results as tables, plots as data URLs."""

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table>{f'<tr>{cells}</tr>' if head else ''}{body}</table>"

    images = "".join(
        f'<h2>{html.escape(name)}</h2><img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in pictures.items()
    )
    latencies = table(
        ["milliseconds", *(f"p{part}" for part in PERCENTILES), "mean", "max"],
        [latency_row(summary, n) for n in LATENCIES],
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>pdserve bench</title><style>{STYLE}</style><h1>pdserve bench</h1>"
        f"{table([], total_rows(summary))}{latencies}{images}<h2>Conditions</h2>{table([], list(conditions.items()))}</html>\n"
    )


def new_figure() -> Figure:
    """Raises: ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--html and --plots need matplotlib, which is not installed: in pdserve's repository, "
            ".venv/bin/python deploy/install.py bench"
        ) from error
    return Figure(figsize=(9, 4), layout="constrained")


def plots(records: Sequence[RequestRecord]) -> dict[str, bytes]:
    """Name -> PNG. Raises: ConfigError where matplotlib is not installed."""
    answered = [record for record in records if record.error is None]
    latencies = [Latencies.of(record) for record in answered]
    series = {
        "time to first token": [one.ttft * 1e3 for one in latencies],
        "time per output token": [one.tpot * 1e3 for one in latencies if one.tpot is not None],
        "end to end": [one.e2el * 1e3 for one in latencies],
    }
    distribution = new_figure()
    for axes, (name, values) in zip(distribution.subplots(1, len(series)), series.items(), strict=True):
        axes.ecdf(values) if values else None
        axes.set(title=name, xlabel="ms", ylabel="share of requests")
    by_time = new_figure()
    axes = by_time.subplots()
    axes.plot([r.sent_s for r in answered], [one.ttft * 1e3 for one in latencies], ".", label="TTFT")
    failed = [record.sent_s for record in records if record.error is not None]
    axes.plot(failed, [0.0] * len(failed), "rx", label="failed")
    axes.set(title="time to first token by sending time", xlabel="s", ylabel="ms")
    axes.legend()
    return {"Latencies": png(distribution), "TTFT by time": png(by_time)}


def png(figure: Figure) -> bytes:
    """The picture's file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def write_plots(pictures: Mapping[str, bytes], folder: Path) -> None:
    for name, data in pictures.items():
        (folder / f"{name.lower().replace(' ', '_')}.png").write_bytes(data)
