"""`Bench`: what every stage uses: where it runs, its rows, its time, and a clock of the device."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch

from gpu.rows import Rows

NOT_MEASURED = math.nan
"""Any time of a dry run. What is computed from it is no number either, and becomes null in a row."""
FLUSH_BYTES = 256 << 20
"""More than the L2 cache of any GPU."""
COPY_BYTES = 2 << 30
MIN_REPEATS, MAX_REPEATS = 5, 200


class Skipped(Exception):
    """A stage cannot run here; the message is the reason."""


class Bench:
    """One stage's run."""

    def __init__(self, rows: Rows, *, dry: bool, ends_at: float) -> None:
        """ends_at: of `time.monotonic`; no case begins later."""
        self.rows = rows
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda:0")
        self._ends_at = ends_at

    @property
    def triton(self) -> str:
        """Value of the settings `kernels` and `attention_backend` for Triton's kernels; torch's in a dry run without Triton."""
        return "torch" if self.dry and find_spec("triton") is None else "triton"

    @property
    def default(self) -> str:
        """Value of those settings for what a worker chooses by itself. On a CPU that would be no kernel."""
        return self.triton if self.dry else "auto"

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def is_late(self, case: str) -> bool:
        """True if the time is over; then the case is named in a row."""
        if self.seconds_left > 0:
            return False
        self.rows.fail(case, "not begun: the stage's time is over")
        return True

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """An error within becomes a row, and the stage continues."""
        try:
            yield
        except Skipped as skipped:
            self.rows.skip(name, str(skipped))
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            self.rows.fail(name, f"{type(error).__name__}: {lines[0][:300]}")
        finally:
            if not self.dry:
                torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device has done everything."""
        if not self.dry:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], *, for_ms: float = 80.0, flush: bool = False) -> float:
        """Median time of `call` on the device; launches count where the host is slower than the device.

        for_ms: measure about that long. flush: empty the L2 cache before each call, for calls whose tensors fit it.
        """
        if self.dry:
            call()
            return NOT_MEASURED
        for _ in range(3):
            call()
        first = self._events(call, 1, None)[0]
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(for_ms / max(first, 1e-3))))
        return statistics.median(self._events(call, repeats, self._flushed if flush else None))

    def graph_milliseconds(self, call: Callable[[], object], *, for_ms: float = 80.0, flush: bool = False) -> float:
        """The same of a CUDA graph of `call`, in which launches cost nothing. Raises: what capturing raises."""
        if self.dry:
            call()
            return NOT_MEASURED
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.milliseconds(graph.replay, for_ms=for_ms, flush=flush)

    @cached_property
    def copy_bytes_per_s(self) -> float:
        """Bytes read and bytes written per second of a copy within the device's memory, together."""
        size = 1 << 16 if self.dry else COPY_BYTES
        source = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(7)
        target = torch.empty_like(source)
        return 2 * size / (self.milliseconds(lambda: target.copy_(source), for_ms=150.0) / 1e3)

    def _events(self, call: Callable[[], object], repeats: int, before: Callable[[], object] | None) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
        for begin, end in pairs:
            if before is not None:
                before()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _flushed(self) -> None:
        self._flush_buffer.zero_()

    @cached_property
    def _flush_buffer(self) -> torch.Tensor:
        return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)


def folder_of(rows: Rows, name: str) -> Path:
    """A new folder beside the rows, for a model or for logs that a stage makes."""
    folder = rows.path.parent / "work" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
