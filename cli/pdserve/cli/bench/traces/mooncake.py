"""Traces in the format of those that were published with Mooncake: JSON lines with arrival times and hash ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession, verify_length
from pdserve.common.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for. Source: the traces published with Mooncake (FAST '25)."""
MAX_LINE_BYTES = 1 << 20


class _Line(msgspec.Struct):
    """One request."""

    timestamp: float
    """Milliseconds from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: Path, num: int | None = None) -> Iterator[TraceSession]:
    """Sessions of one request each, by arrival; the first one arrives at 0.

    num: number of lines, at most. Raises: ConfigError naming file and line.
    """
    decoder = msgspec.json.Decoder(_Line)
    first_s: float | None = None
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"--trace is {path}, which cannot be read: {error.strerror}") from error
    with file as lines:
        number = 0
        while (num is None or number < num) and (line := lines.readline(MAX_LINE_BYTES + 1)):
            number += 1
            if not line.strip():
                continue
            entry = _entry(decoder, line, f"{path}, line {number}")
            arrival_s = entry.timestamp / 1e3
            first_s = arrival_s if first_s is None else first_s
            name = f"line {number}"
            request = TraceRequest(name, entry.input_length, entry.output_length, tuple(entry.hash_ids))
            yield TraceSession(name, str(path), BLOCK_TOKENS, (request,), arrival_s - first_s)


def _entry(decoder: msgspec.json.Decoder[_Line], line: bytes, label: str) -> _Line:
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"{label}: longer than {MAX_LINE_BYTES} bytes")
    try:
        entry = decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{label}: {error}") from error
    verify_length(label, "input_length", entry.input_length)
    verify_length(label, "output_length", entry.output_length)
    num_blocks = -(-entry.input_length // BLOCK_TOKENS)
    if entry.hash_ids and len(entry.hash_ids) != num_blocks:
        raise ConfigError(
            f"{label}: {len(entry.hash_ids)} hash_ids for {entry.input_length} tokens, {num_blocks} blocks of "
            f"{BLOCK_TOKENS} tokens are needed"
        )
    return entry
