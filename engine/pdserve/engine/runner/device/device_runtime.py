"""`DeviceRuntime`: what the runner needs of a device in addition to tensors: events, and memory that a copy does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pdserve.common import clock
from pdserve.common.device_event import DeviceEvent


class TimedEvent(DeviceEvent, Protocol):
    """A point in a device's work whose time can be read after `synchronize`."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Seconds of the device between two of its events, both reached."""


class DeviceRuntime(Protocol):
    """One device. Tests replace it."""

    @property
    def is_synchronous(self) -> bool:
        """True if every operation has ended when its call returns, as on a CPU."""

    @property
    def has_graphs(self) -> bool:
        """True if `capture` is possible."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `work`, without running them; the result launches them again, over the same memory.

        `work` has run before. What captures allocate is theirs for good, and shared: replays overwrite each other's.
        """

    def event(self) -> TimedEvent:
        """An event after all work queued so far."""

    def copy_beside(self, after: DeviceEvent, copies: Callable[[], None]) -> None:
        """Run copies that steps do not wait for, after an event; returns when they have ended. Called by a thread of its own."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8 in main memory, pinned where a device copies from it and to it."""


@dataclass(frozen=True, slots=True)
class ClockEvent:
    """Implements `TimedEvent` for a CPU."""

    at: float = field(default_factory=clock.monotonic)

    def synchronize(self) -> None:
        """No effect: all work before has ended."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, ClockEvent)
        return self.at - earlier.at


class ProcessorRuntime:
    """Implements `DeviceRuntime` for main memory, and for devices that are simulated in it."""

    is_synchronous = True
    has_graphs = False

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("a CPU has no graphs")

    def event(self) -> ClockEvent:
        return ClockEvent()

    def copy_beside(self, after: DeviceEvent, copies: Callable[[], None]) -> None:
        after.synchronize()
        copies()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class CudaEvent:
    """Implements `TimedEvent`."""

    def __init__(self, device: torch.device) -> None:
        # blocking: a thread that waits leaves its core to others, instead of asking again and again
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def synchronize(self) -> None:
        self._event.synchronize()

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Let work that is queued later in a stream wait for this event."""
        stream.wait_event(self._event)

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaRuntime:
    """Implements `DeviceRuntime` for a GPU."""

    is_synchronous = False
    has_graphs = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph_memory: Any = None
        self._copy_stream: torch.cuda.Stream | None = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # other threads, which copy blocks of transfers, may go on
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            work()
        self._graph_memory = graph.pool()
        return graph.replay

    def event(self) -> CudaEvent:
        return CudaEvent(self._device)

    def copy_beside(self, after: DeviceEvent, copies: Callable[[], None]) -> None:
        assert isinstance(after, CudaEvent)
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            after.precede(self._copy_stream)
            copies()
            ended = self.event()
        ended.synchronize()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def make_runtime(device: torch.device) -> DeviceRuntime:
    return CudaRuntime(device) if device.type == "cuda" else ProcessorRuntime()
