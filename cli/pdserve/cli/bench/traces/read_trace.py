"""`read_trace`: sessions of a trace in any of the formats that are known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import get_args

from pdserve.cli.bench.trace_options import TraceFormat
from pdserve.cli.bench.traces.azure import HEADER, read_azure
from pdserve.cli.bench.traces.mooncake import read_mooncake
from pdserve.cli.bench.traces.servegen import is_servegen, read_servegen
from pdserve.cli.bench.traces.trace import TraceSession
from pdserve.cli.bench.traces.trace_file import first_bytes, unreadable
from pdserve.cli.bench.traces.weka import read_weka
from pdserve.common.errors import ConfigError

_LOOKED_AT_BYTES = 4096
_IN_ANY_ORDER: Mapping[TraceFormat, Callable[[Path], Iterator[TraceSession]]] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
}
"""Readers of files whose lines may be in any order."""


def read_trace(path: Path, num: int, *, trace_format: TraceFormat | None = None, seed: int = 0) -> list[TraceSession]:
    """The first `num` sessions by their start; the first one begins at 0.

    path: a file, or a folder of WEKA's sessions or of ServeGen's clients. trace_format: None to tell it from the content. seed: for
    what is drawn. Raises: ConfigError naming the file, its line, the field and its value.
    """
    trace_format = trace_format or format_of(path)
    if (reader := _IN_ANY_ORDER.get(trace_format)) is not None:
        sessions = heapq.nsmallest(num, reader(path), key=lambda session: session.start_s)
    else:
        # these come by their start, and there may be far more than are asked for
        found = read_servegen(path, seed) if trace_format == "servegen" else map(read_weka, _weka_files(path))
        sessions = [*islice((session for session in found if session.steps), num)]
    first_s = sessions[0].start_s if sessions else 0.0
    return [replace(session, start_s=session.start_s - first_s) for session in sessions]


def fitted(sessions: Iterable[TraceSession], scale: int, speed: float, max_think_s: float) -> list[TraceSession]:
    """As `TraceSession.scaled` and `timed`. Raises: ConfigError for a scale that does not divide the blocks."""
    try:
        scaled = [session.scaled(scale) for session in sessions]
    except ConfigError as error:
        raise ConfigError(f"--trace-scale is {scale}: {error.message}") from error
    return [session.timed(speed, max_think_s) for session in scaled]


def format_of(path: Path) -> TraceFormat:
    """The format of a file or folder, by its content. Raises: ConfigError."""
    if is_servegen(path):
        return "servegen"
    if path.is_dir():
        return "weka"
    begin = first_bytes(path, _LOOKED_AT_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if begin.startswith(HEADER[0].encode()):
        return "azure"
    if begin.startswith(b"{"):
        # a line of Mooncake's format is an object of its own
        return "mooncake" if b'"timestamp"' in begin or b'"input_length"' in begin else "weka"
    if not begin:
        return "mooncake"
    raise ConfigError(
        f"--trace is {path}, which begins with {begin[:40]!r} and has no known format: --trace-format names one of "
        f"{', '.join(get_args(TraceFormat))}"
    )


def _weka_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    try:
        files = sorted(path.glob("*.json"))
    except OSError as error:
        raise unreadable(path, error) from error
    if not files:
        raise ConfigError(f"--trace is {path}, a folder without files *.json or chunk-N-trace.csv")
    yield from files
