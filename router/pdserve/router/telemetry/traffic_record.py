"""`TrafficRecord`: a line per prompt that the router served, without content, in the format of Mooncake's published traces.

Mooncake's four fields come first, and readers of that format find what they need; all others are ours. docs/capacity.md says what
each means.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.telemetry.line_writer import LineFile, LineWriter, Rotation
from pdserve.common.timeline import now_unix_ns
from pdserve.router.telemetry.request_trace import PromptTrace, RequestTrace

MAX_NUMBERED_BLOCKS = 1 << 19
"""Blocks of prompts that have a number, at most; half as many, those that were used last, always have it."""
MAX_NUMBERED_TENANTS = 1 << 14
MAX_WAITING_LINES = 1 << 14
MAX_WAITING_BYTES = 32 << 20
_LINE_BYTES = 1024
"""What a waiting line takes in addition to its block hashes, about."""


class _Line(msgspec.Struct, omit_defaults=True):
    timestamp: int
    """Arrival, milliseconds from the start of the record."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    tenant: int
    priority: int
    outcome: str
    cached_tokens: int
    attempts: int
    block_size: int = 0
    """0 for a prompt that no worker got, which has no hash ids."""
    n: int = 1
    service_tier: str | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prefill: str = ""
    decode: str = ""


class _Entry(msgspec.Struct):
    """A line whose numbers are still to be found, which takes time with the number of blocks."""

    line: _Line
    tenant: str
    block_hashes: bytes


class Numbers:
    """Consecutive numbers for keys, from 0 on; a key that is forgotten gets another number when it returns.

    Of `max_keys`, the half that was used last is always known. The keys of one call are forgotten together, but for those that are
    used again: a prefix that several prompts have remains.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_recent = max(1, max_keys // 2)
        self._recent: dict[int | str, int] = {}
        self._older: dict[int | str, int] = {}
        """Keys that were used before the recent ones; some are recent, too."""
        self._next = 0

    def __len__(self) -> int:
        """Keys that take memory."""
        return len(self._recent) + len(self._older)

    def draw(self) -> int:
        """A number that no key has."""
        self._next += 1
        return self._next - 1

    def of(self, keys: Iterable[int | str]) -> list[int]:
        """Their numbers, in their order."""
        recent, found = self._recent, list[int]()
        for key in keys:
            if (number := recent.get(key)) is None:
                number = self._older.get(key)
                recent[key] = number = self.draw() if number is None else number
            found.append(number)
        if len(recent) > self._max_recent:
            self._recent, self._older = {}, recent
        return found


class TrafficRecord:
    """Writes the record if the settings name a file. `close` it."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raises: ConfigError for a file that cannot be written."""
        self._started_unix_ns = now_unix_ns()
        self._blocks, self._tenants = Numbers(MAX_NUMBERED_BLOCKS), Numbers(MAX_NUMBERED_TENANTS)
        self._writer: LineWriter[_Entry] | None = None
        if (name := settings.record) is None:
            return
        rotation = Rotation(settings.record_mib << 20, settings.limits.max_record_files)
        try:
            file = LineFile(Path(name), rotation)
        except OSError as error:
            raise ConfigError(f"record is {name}, which cannot be written: {error.strerror}") from error
        self._writer = LineWriter(
            "record", file, self._encode, max_waiting=MAX_WAITING_LINES, max_waiting_bytes=MAX_WAITING_BYTES
        )

    @property
    def is_on(self) -> bool:
        return self._writer is not None

    @property
    def counts(self) -> Mapping[str, int]:
        """Outcome -> lines, as `LineWriter.counts`."""
        return self._writer.counts if self._writer is not None else {"written": 0, "dropped": 0}

    def ended(self, request: RequestTrace, tenant: str) -> None:
        """Write a line per prompt of an ended request, without those that were refused before they were tokenized."""
        if self._writer is None:
            return
        arrived_ms = max(0, request.started_unix_ns - self._started_unix_ns) // 1_000_000
        for prompt in request.runs:
            if prompt.num_prompt_tokens:
                hashes = prompt.block_hashes
                entry = _Entry(_line(prompt, arrived_ms), tenant, hashes)
                self._writer.put(entry, _LINE_BYTES + len(hashes))

    def close(self) -> None:
        """Write the waiting lines, for a limited time."""
        if self._writer is not None:
            self._writer.close()

    def _encode(self, entry: _Entry) -> bytes:
        line = entry.line
        [line.tenant] = self._tenants.of([entry.tenant])
        line.hash_ids = self._blocks.of(array("Q", entry.block_hashes))
        if line.block_size and line.input_length % line.block_size:
            # a last block that is not full is no other prompt's, and Mooncake's readers expect that it has a number
            line.hash_ids.append(self._blocks.draw())
        return msgspec.json.encode(line)


def _line(prompt: PromptTrace, arrived_ms: int) -> _Line:
    ttft_s, tpot_s, num_sequences = prompt.timeline.ttft_s, prompt.tpot_s, prompt.num_sequences
    return _Line(
        timestamp=arrived_ms,
        input_length=prompt.num_prompt_tokens,
        output_length=math.ceil(prompt.num_output_tokens / num_sequences),
        hash_ids=[],
        tenant=0,
        priority=prompt.priority,
        outcome=prompt.outcome,
        cached_tokens=prompt.cached_tokens.total,
        attempts=prompt.num_attempts,
        block_size=prompt.block_size,
        n=num_sequences,
        service_tier=prompt.service_tier,
        ttft_ms=None if ttft_s is None else round(ttft_s * 1e3, 3),
        tpot_ms=None if tpot_s is None else round(tpot_s * 1e3, 3),
        prefill=prompt.prefill,
        decode=prompt.decode,
    )
