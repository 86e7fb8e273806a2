"""Traces in the format of those that were published with Mooncake: JSON lines with arrival times and hash ids.

A router's record has the same format, with its block size on each line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession, verify_length, verify_time
from pdserve.cli.bench.traces.trace_file import decoded, lines_of
from pdserve.common.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for where a line does not say it. Source: the traces published with Mooncake (FAST '25)."""


class _Line(msgspec.Struct):
    """One request."""

    timestamp: float
    """Milliseconds from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    block_size: int = BLOCK_TOKENS


def read_mooncake(path: Path) -> Iterator[TraceSession]:
    """Sessions of one request each, in the order of the file. Raises: ConfigError naming file, line, field and value."""
    decoder = msgspec.json.Decoder(_Line)
    for label, data in lines_of(path):
        line = decoded(label, data, decoder.decode)
        _verify(line, label)
        name = label.removeprefix(f"{path}, ")
        request = TraceRequest(name, line.input_length, line.output_length, line.hash_ids)
        # blocks of another size are other blocks, whatever their ids
        yield TraceSession(name, f"{path} {line.block_size}", line.block_size, (request,), line.timestamp / 1e3)


def _verify(line: _Line, label: str) -> None:
    verify_time(label, "timestamp", line.timestamp / 1e3)
    verify_length(label, "input_length", line.input_length)
    # a request that failed has none, and neither has an embedding
    verify_length(label, "output_length", line.output_length, least=0)
    verify_length(label, "block_size", line.block_size)
    num_blocks = -(-line.input_length // line.block_size)
    # some writers give a block that is not full no id
    if line.hash_ids and len(line.hash_ids) not in (num_blocks, line.input_length // line.block_size):
        raise ConfigError(
            f"{label}: hash_ids has {len(line.hash_ids)} entries for {line.input_length} tokens, {num_blocks} blocks of "
            f"{line.block_size} tokens are needed"
        )
