"""Azure's traces of LLM inference: CSV with the time, prompt length and answer length of each request, without shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession, verify_length
from pdserve.cli.bench.traces.trace_file import rows_of
from pdserve.common.errors import ConfigError

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MAX_SHOWN_CHARS = 64


def read_azure(path: Path) -> Iterator[TraceSession]:
    """Sessions of one request each, in the order of the file. Raises: ConfigError naming file, line, field and value."""
    rows = rows_of(path)
    label, header = next(rows, (f"{path}, line 1", []))
    if tuple(header) != HEADER:
        raise ConfigError(
            f"{label}: the header {','.join(HEADER)} is needed, not {','.join(header)[:_MAX_SHOWN_CHARS]!r}"
        )
    for label, row in rows:
        if len(row) != len(HEADER):
            raise ConfigError(f"{label}: {len(row)} fields, {len(HEADER)} are needed")
        arrival, num_input, num_output = row
        name = label.removeprefix(f"{path}, ")
        request = TraceRequest(
            name, _length(label, HEADER[1], num_input, least=1), _length(label, HEADER[2], num_output, least=0)
        )
        yield TraceSession(name, str(path), 0, (request,), _seconds(label, arrival))


def _seconds(label: str, value: str) -> float:
    """Since 1970; without a time zone the time is UTC."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError as error:
        raise ConfigError(f"{label}: {HEADER[0]} is {value[:_MAX_SHOWN_CHARS]!r}, a date and time is needed") from error
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _length(label: str, name: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise ConfigError(f"{label}: {name} is {value[:_MAX_SHOWN_CHARS]!r}, a number of tokens is needed")
    verify_length(label, name, int(value), least)
    return int(value)
