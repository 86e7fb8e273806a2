"""Changes of valid input, by bytes and by structure, for as long as a fuzz test is asked to run.

`make fuzz SECONDS=1800` sets `FUZZ_S`, which all fuzz tests share; without it each runs a few seconds. `FUZZ_SEED` gives other
cases; a case that fails is printed with its seed and number.
"""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

DEFAULT_S = 3.0
"""Of each fuzz test in `make test`."""
_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63, 10**30, 0.5, -0.0, 1e308, 1e-320)
_TEXTS = (
    "",
    "a",
    "\x00",
    "\ud7ff\ue000",
    "é" * 50,
    "💥",
    "{{ 7 * 7 }}",
    "../../etc/passwd",
    "a" * 2000,
    "None",
    "[[[[",
    "\\",
)
_BYTES = (
    b"",
    b"\x00",
    b"\xff" * 8,
    b"\x80" * 12,
    b"\x7f\xff\xff\xff",
    b"\r\n\r\n",
    b"{",
    b'"',
    b"[" * 64,
    b"\xed\xa0\x80",
)


def seconds_of(request: pytest.FixtureRequest) -> float:
    """Seconds that this test has: an equal share of `FUZZ_S` with the other fuzz tests of the run."""
    total = os.environ.get("FUZZ_S")
    if total is None:
        return DEFAULT_S
    num_tests = sum(item.get_closest_marker("fuzz") is not None for item in request.session.items)
    return float(total) / max(1, num_tests)


class Fuzzer:
    """Draws from one seed; `cases` ends when the time is over."""

    def __init__(self, seconds: float, seed: int | None = None) -> None:
        self.seed = int(os.environ.get("FUZZ_SEED", "1")) if seed is None else seed
        self.draw = random.Random(self.seed)
        self.num_cases = 0
        self._seconds = seconds

    def __str__(self) -> str:
        return f"case {self.num_cases} of seed {self.seed}"

    def cases(self) -> Iterator[int]:
        """The numbers of the cases."""
        ends_at = time.monotonic() + self._seconds
        while time.monotonic() < ends_at:
            self.num_cases += 1
            yield self.num_cases

    def bytes(self, data: bytes) -> bytes:
        """The data with one to eight changes of bytes."""
        changed = bytearray(data)
        for _ in range(self.draw.choice((1, 1, 1, 2, 4, 8))):
            at = self.draw.randrange(len(changed) + 1)
            match self.draw.randrange(6):
                case 0 if changed:
                    changed[at % len(changed)] ^= 1 << self.draw.randrange(8)
                case 1:
                    changed[at:at] = self.draw.choice(_BYTES)
                case 2:
                    del changed[at : at + self.draw.choice((1, 2, 8, 64))]
                case 3:
                    changed[at:at] = changed[at : at + self.draw.choice((1, 8, 64))] * self.draw.choice((1, 2, 16))
                case 4:
                    del changed[at:]
                case _:
                    changed[at : at + 4] = self.draw.randbytes(self.draw.choice((1, 4, 16)))
        return bytes(changed)

    def json(self, value: Any) -> Any:
        """A copy with one to four nodes replaced, removed, repeated or nested."""
        changed = copy.deepcopy(value)
        for _ in range(self.draw.choice((1, 1, 2, 4))):
            changed = self._changed(changed, 0)
        return changed

    def _changed(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict) and value and self.draw.random() < 0.85:
            key = self.draw.choice(list(value))
            match self.draw.randrange(8):
                case 0:
                    del value[key]
                case 1:
                    value[self.draw.choice(_TEXTS)[:40]] = value[key]
                case _:
                    value[key] = self._changed(value[key], depth + 1)
            return value
        if isinstance(value, list) and value and self.draw.random() < 0.8:
            at = self.draw.randrange(len(value))
            match self.draw.randrange(6):
                case 0:
                    del value[at]
                case 1:
                    value[at:at] = [value[at]] * self.draw.choice((1, 20, 300))
                case _:
                    value[at] = self._changed(value[at], depth + 1)
            return value
        odd: list[Any] = [None, True, [], {}, [value], {"a": value}, *_NUMBERS, *_TEXTS]
        return self.draw.choice(odd)
