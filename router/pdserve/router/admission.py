"""Who may come in, and who may run: limits that are held at once, and a queue: lowest `priority` value first, then
order of arrival.

A request *enters* the router, or is refused on the spot. It then waits for a *place*: there are as many as the workers
can serve at the same time. Whoever would wait longer than it may is refused when it enters, by the time that places are
held and the number of requests ahead of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn

import msgspec

from pdserve.common.errors import Draining, InvalidRequest, Overloaded
from pdserve.common.priority_queue import PriorityQueue

RETRY_AFTER_S = 1.0
RETRY_AFTER_MAX_S = 30.0
_KEPT = 0.9
"""Part of the past in the mean time of a place, with each place that is given back."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What may run at the same time."""

    num_requests: int
    """Places: a request takes one for each of its sequences."""
    num_blocks: int | None = None
    """KV blocks of their prompts, together; None: no limit."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What settings say about admission."""

    max_queued_requests: int
    """That wait for a place."""
    queue_timeout_s: float = 30.0
    """How long a request waits for one."""
    max_requests_per_key: int | None = None


class _Waiter(msgspec.Struct, gc=False, eq=False):
    num_blocks: int
    num_places: int
    granted: asyncio.Future[None]


class Admission:
    """Counts the requests in the router, and gives places in the queue's order."""

    def __init__(
        self, limits: Limits, capacity: Callable[[], Capacity], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """capacity: asked whenever a place might be given; call `recheck` when it has grown."""
        self._limits = limits
        self._capacity = capacity
        self._clock = clock
        self._closing = asyncio.Event()
        self.num_requests = 0
        """That entered and have not left."""
        self.num_running = 0
        """Places that are held."""
        self._running_blocks = 0
        self._running_since = 0.0
        """Sum of the moments at which those that run got their places."""
        self._mean_s: float | None = None
        self._queue = PriorityQueue[_Waiter]()
        self._per_client: Counter[str] = Counter()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._expel: dict[Callable[[], None], None] = {}

    @property
    def closed(self) -> bool:
        """Nobody comes in any more."""
        return self._closing.is_set()

    @property
    def num_queued(self) -> int:
        """That wait for a place now."""
        return len(self._queue)

    def enter(
        self, num_requests: int, expel: Callable[[], None], *, client: str = "", timeout_s: float | None = None
    ) -> None:
        """Take requests in. Call `leave` with the same requests, client and expel when they have ended.

        expel: called if the router cannot wait for these requests to end. client: whose they are, for the limit per
        key; "" has none. timeout_s: until when they must be done.
        Raises: Overloaded, at once, when there is no room or the wait would be too long; InvalidRequest for more than a
        key may ever have; Draining after `close`.
        """
        if self.closed:
            raise _leaving()
        self._check_client(client, num_requests)
        self._check_room(num_requests, timeout_s)
        self.num_requests += num_requests
        if client:
            self._per_client[client] += num_requests
        self._expel[expel] = None
        self._emptied.clear()

    def leave(self, num_requests: int, expel: Callable[[], None], *, client: str = "") -> None:
        """Arguments as they were given to `enter`."""
        self.num_requests -= num_requests
        if client:
            self._per_client[client] -= num_requests
            if not self._per_client[client]:
                del self._per_client[client]
        self._expel.pop(expel, None)
        if not self.num_requests:
            self._emptied.set()

    @contextlib.asynccontextmanager
    async def place(
        self,
        num_blocks: int = 0,
        priority: int = 0,
        num_places: int = 1,
        until_hopeless: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> AsyncIterator[None]:
        """Hold a place inside the context, or several.

        num_blocks: KV blocks of the prompt. priority: lower goes first. until_hopeless: awaited by those that have to
        wait, raises when a place would be of no use to them; it does not return.
        Raises: Overloaded after `queue_timeout_s`; what `until_hopeless` does.
        """
        waiter = _Waiter(num_blocks, num_places, asyncio.get_running_loop().create_future())
        self._queue.append(id(waiter), waiter, priority)
        self.recheck()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                if waiter.granted.done() or until_hopeless is None:
                    await waiter.granted
                else:
                    await _granted(waiter, until_hopeless())
        except TimeoutError:
            self._abandon(waiter)
            raise Overloaded(
                f"no place became free within {self._limits.queue_timeout_s:g} s (queue_timeout_s)",
                self._retry_after_s(self.num_queued),
            ) from None
        except BaseException:
            self._abandon(waiter)
            raise
        started_at = self._clock()
        self._running_since += started_at * num_places
        try:
            yield
        finally:
            self._running_since -= started_at * num_places
            self._learn(self._clock() - started_at)
            self._give_back(waiter)

    def recheck(self) -> None:
        """Give free places to the first in the queue."""
        capacity = self._capacity()
        while (waiter := self._queue.peek()) is not None and self._fits(waiter, capacity):
            self._queue.remove(id(waiter))
            if not waiter.granted.done():
                self.num_running += waiter.num_places
                self._running_blocks += waiter.num_blocks
                waiter.granted.set_result(None)

    def estimated_wait_s(self, num_ahead: int) -> float | None:
        """How long somebody with so many before them, themselves included, waits for a place; None: not known yet."""
        mean_s = self._mean_place_s()
        if mean_s is None:
            return None
        # what runs while others wait is what fits, whatever the count of places says
        at_once = self.num_running if self._queue else self._capacity().num_requests
        # without a worker nobody knows
        return num_ahead * mean_s / at_once if at_once else None

    def close(self) -> None:
        """From now on nobody comes in."""
        self._closing.set()

    async def until_closed(self) -> NoReturn:
        """For who stays in the router without a request. Raises: Draining after `close`."""
        await self._closing.wait()
        raise _leaving()

    def expel(self) -> None:
        """End the requests that are still in the router."""
        for expel in list(self._expel):
            expel()

    async def emptied(self) -> None:
        """Returns when no request is in the router."""
        await self._emptied.wait()

    def _check_client(self, client: str, num_requests: int) -> None:
        limit = self._limits.max_requests_per_key
        if client and limit is not None and num_requests > limit:
            raise InvalidRequest(f"{num_requests} prompts came in one request; max_requests_per_key is {limit}")
        if client and limit is not None and self._per_client[client] + num_requests > limit:
            raise Overloaded(
                f"{self._per_client[client]} requests of this API key are in the router and {num_requests} more came; "
                f"max_requests_per_key is {limit}",
                RETRY_AFTER_S,
            )

    def _check_room(self, num_requests: int, timeout_s: float | None) -> None:
        # those that are still being tokenized will wait too
        num_ahead = self.num_requests + num_requests - self._capacity().num_requests
        if self._queue:
            num_ahead = max(num_ahead, self.num_requests - self.num_running + num_requests)
        if num_ahead <= 0:
            return
        limit = self._limits.max_queued_requests
        # those of one request may be more, or it would be refused however often it came
        if num_ahead > limit and num_ahead > num_requests:
            raise Overloaded(
                f"{self.num_requests} requests are in the router, {self.num_running} of them run, and {num_requests} "
                f"more came; at most {limit} may wait (max_queued_requests)",
                self._retry_after_s(num_ahead - limit),
            )
        wait_s = self.estimated_wait_s(num_ahead)
        if wait_s is None:
            return
        if wait_s > self._limits.queue_timeout_s:
            raise Overloaded(
                f"a place would be free in about {wait_s:.1f} s, queue_timeout_s is {self._limits.queue_timeout_s:g}",
                self._retry_after_s(num_ahead),
            )
        if timeout_s is not None and wait_s + (self._mean_place_s() or 0.0) > timeout_s:
            raise Overloaded(
                f"it could not be done in time: a place would be free in about {wait_s:.1f} s, the request's deadline "
                f"is in {timeout_s:.1f} s",
                self._retry_after_s(num_ahead),
            )

    def _retry_after_s(self, num_ahead: int) -> float:
        wait_s = self.estimated_wait_s(num_ahead) or RETRY_AFTER_S
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, wait_s))

    def _fits(self, waiter: _Waiter, capacity: Capacity) -> bool:
        if not self.num_running:
            return True
        if self.num_running + waiter.num_places > capacity.num_requests:
            return False
        return capacity.num_blocks is None or self._running_blocks + waiter.num_blocks <= capacity.num_blocks

    def _mean_place_s(self) -> float | None:
        """How long a place is held; before any was given back, how long those that run have held theirs."""
        if self._mean_s is not None or not self.num_running:
            return self._mean_s
        return max(0.0, self._clock() - self._running_since / self.num_running)

    def _learn(self, held_s: float) -> None:
        self._mean_s = held_s if self._mean_s is None else _KEPT * self._mean_s + (1 - _KEPT) * held_s

    def _abandon(self, waiter: _Waiter) -> None:
        if waiter.granted.done() and not waiter.granted.cancelled():
            self._give_back(waiter)
        else:
            self._queue.remove(id(waiter))
            # whoever stood behind a prompt that did not fit may fit
            self.recheck()

    def _give_back(self, waiter: _Waiter) -> None:
        self.num_running -= waiter.num_places
        self._running_blocks -= waiter.num_blocks
        self.recheck()


async def _granted(waiter: _Waiter, hopeless: Coroutine[Any, Any, None]) -> None:
    """Returns when the waiter has its places. Raises: what `hopeless` does before."""
    losing_hope = asyncio.ensure_future(hopeless)
    # not by `first_of`: it would cancel the grant while the waiter still stands in the queue
    try:
        await asyncio.wait((waiter.granted, losing_hope), return_when=asyncio.FIRST_COMPLETED)
        if not waiter.granted.done():
            losing_hope.result()
    finally:
        losing_hope.cancel()
        # it may have ended beside the grant: its error is not asked for
        await asyncio.gather(losing_hope, return_exceptions=True)


def _leaving() -> Draining:
    return Draining("this router is shutting down")
