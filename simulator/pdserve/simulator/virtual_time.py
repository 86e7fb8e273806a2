"""`VirtualTime` and `VirtualLoop`: an event loop in which waiting takes no time.

When no callback is ready, the clock jumps to the next timer. So a simulation takes as long as its callbacks take to compute, and
the same callbacks run in the same order each time. Functions for threads run at once, in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from pdserve.common import clock

START_S = 1_000_000.0
"""Where the monotonic clock begins: some code takes 0 for "never"."""
START_UNIX_S = 1_600_000_000.0
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stalled(RuntimeError):
    """Every task waits for something that no timer and no callback will bring."""


class VirtualTime:
    """A `Clock`. `spend` moves it only for the code that runs within `apart`: a step of an engine takes time for that engine, whose
    messages leave at its end."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._apart_s = 0.0
        self._is_apart = False

    @property
    def now_s(self) -> float:
        """Seconds since the beginning, for the code that runs."""
        return self._now_s + self._apart_s

    def monotonic(self) -> float:
        return START_S + self._now_s + self._apart_s

    def monotonic_ns(self) -> int:
        return round(self.monotonic() * 1e9)

    def time(self) -> float:
        return START_UNIX_S + self._now_s + self._apart_s

    def time_ns(self) -> int:
        return round(self.time() * 1e9)

    def advance(self, seconds: float) -> None:
        """Let time pass for all."""
        self._now_s += seconds

    def spend(self, seconds: float) -> None:
        """Let time pass for the code within `apart`. Raises: RuntimeError outside."""
        if not self._is_apart:
            raise RuntimeError("time is spent within `apart`")
        self._apart_s += max(0.0, seconds)

    def spend_until(self, monotonic_s: float) -> None:
        """`spend` the time until the clock shows this; none if it has."""
        self.spend(monotonic_s - self.monotonic())

    @contextlib.contextmanager
    def apart(self) -> Iterator[Callable[[], float]]:
        """Yields a function that returns the seconds spent in the block."""
        if self._is_apart:
            raise RuntimeError("`apart` is not nested")
        self._is_apart, spent = True, 0.0
        try:
            yield lambda: spent or self._apart_s
        finally:
            spent, self._apart_s, self._is_apart = self._apart_s, 0.0, False


class _Timer(asyncio.TimerHandle):
    """Timers of the same moment run in the order in which they were set."""

    __slots__ = ("number",)
    number: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self.number) < (other.when(), other.number)


class _Jump(selectors.BaseSelector):
    """A selector without files: it lets time pass in place of waiting."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(
            fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data
        )
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self.register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stalled("the simulation has no timer left, and is not over")
        self._time.advance(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of a simulation. It has no sockets, no signals and no threads."""

    def __init__(self, virtual: VirtualTime) -> None:
        super().__init__(_Jump(virtual))
        self.virtual = virtual
        self._numbers = itertools.count()

    def time(self) -> float:
        return self.virtual.monotonic()

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]  # asyncio's own list of timers
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """At the time of the caller, which may be apart from that of the loop."""
        return self.call_at(self.time(), callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Call at once. Returns: a future that is done."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(main: Callable[[VirtualTime], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine under virtual time, which begins with it. Raises: Stalled if it waits for what never comes."""
    virtual = VirtualTime()
    with clock.used(virtual), asyncio.Runner(loop_factory=lambda: VirtualLoop(virtual)) as runner:
        return runner.run(main(virtual))
