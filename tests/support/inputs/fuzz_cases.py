"""Changes of valid input, by bytes and by structure, for as long as a fuzz test is asked to run.

All tests marked `fuzz` of a run share `FUZZ_S` seconds, which `make fuzz SECONDS=1800` sets: equally, but for those with a
`share` of their own, `pytest.mark.fuzz(share=0.5)`. Without `FUZZ_S` they share `DEFAULT_S`. `FUZZ_SEED` gives other cases; a
case that fails is printed with its seed and number. The fixture `fuzzer` (`tests/conftest.py`) is how a test gets its part.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.support.run.loop_watch import LoopWatch
from tests.support.run.process_memory import settled_bytes

DEFAULT_S = 10.0
"""All fuzz tests together in `make test`."""
MOST_LATE_BYTES = 32 << 20
"""Growth of memory that is allowed in the second half of a run."""
LONG_S = 120.0
"""In shorter runs its second half is part of the beginning."""
MOST_S = 1.0
"""One of them, however few run."""
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


def share_of(item: pytest.Item) -> float:
    """0 for a test that is not marked `fuzz`."""
    mark = item.get_closest_marker("fuzz")
    return 0.0 if mark is None else float(mark.kwargs.get("share", 1.0))


def seconds_of(item: pytest.Item, items: Iterable[pytest.Item]) -> float:
    """Seconds that a test has among all tests of its run: together the fuzz tests take what was asked for."""
    asked = os.environ.get("FUZZ_S")
    part = share_of(item) / sum(map(share_of, items))
    return min(MOST_S, DEFAULT_S * part) if asked is None else float(asked) * part


class Fuzzer:
    """Draws from one seed; `cases` ends when the time is over."""

    def __init__(self, seconds: float, seed: int | None = None) -> None:
        self.seed = int(os.environ.get("FUZZ_SEED", "1")) if seed is None else seed
        self.draw = random.Random(self.seed)
        self.seconds = seconds
        self.num_cases = 0
        self.longest_s = 0.0
        """CPU time of the longest case; where a `LoopWatch` was given to `watched_by`, of the longest callback."""
        self._memory: list[tuple[float, int]] = []
        """Looks: seconds since the first case, bytes."""
        self._began_at = time.monotonic()
        self._watch: LoopWatch | None = None
        self.measure: Callable[[], int] = settled_bytes
        """Called at each look at memory; `in_use_bytes` where many threads allocate."""

    def __str__(self) -> str:
        return f"case {self.num_cases} of seed {self.seed}"

    def watched_by(self, watch: LoopWatch) -> None:
        """Report what it measures of the event loop, in place of whole cases."""
        self._watch = watch

    def cases(self, *, looks: bool = True) -> Iterator[int]:
        """The numbers of the cases, at least 1. looks: False where the test calls `look_at_memory`, when nothing is under way."""
        self._began_at = time.monotonic()
        self.look_at_memory()
        while self.num_cases == 0 or time.monotonic() < self._began_at + self.seconds:
            if looks and len(self._memory) == 1 and time.monotonic() > self._began_at + self.seconds / 2:
                self.look_at_memory()
            self.num_cases += 1
            began_s = time.process_time()
            yield self.num_cases
            case_s = time.process_time() - began_s
            self.longest_s = max(self.longest_s, case_s) if self._watch is None else self._watch.longest_s
        if looks:
            self.look_at_memory()

    def look_at_memory(self) -> None:
        with contextlib.nullcontext() if self._watch is None else self._watch.leaving_out():
            self._memory.append((time.monotonic() - self._began_at, self.measure()))

    @property
    def grown_bytes(self) -> int:
        """Memory of this process beyond that before the first case."""
        return self._memory[-1][1] - self._memory[0][1] if self._memory else 0

    @property
    def grown_late_bytes(self) -> int:
        """The part of it that came in the second half of the time: libraries have what they keep by then."""
        late = [num_bytes for at, num_bytes in self._memory if at >= self.seconds / 2]
        return late[-1] - late[0] if late else 0

    def check_memory(self, most_bytes: int = 64 << 20) -> None:
        """Raises: AssertionError where it grew by more, or went on growing."""
        assert self.grown_bytes < most_bytes, self.report()
        assert self.grown_late_bytes < MOST_LATE_BYTES or self.seconds < LONG_S, self.report()

    def report(self) -> str:
        """One line for people."""
        unit = "case" if self._watch is None else "callback"
        return (
            f"{self.num_cases} cases in {self.seconds:.1f} s, longest {unit} {self.longest_s * 1e3:.1f} ms of CPU time, "
            f"memory {self.grown_bytes / 2**20:+.1f} MiB, in the second half {self.grown_late_bytes / 2**20:+.1f} MiB"
        )

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
