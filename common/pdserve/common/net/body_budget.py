"""`BodyBudget`: how many bytes of requests may be in reading at the same time, outside of admission."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable
from typing import TypeVar

from pdserve.common.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")
FAIR_SHARE_S = 5.0
"""Seconds for which a body keeps its room while others wait for it; a body at the limit needs less on any usable network."""
MAX_WAIT_S = 10.0
"""Seconds for which a request waits until its body may be read."""
_LOOK_AGAIN_S = 0.25


class BodyBudget:
    """Each body has room reserved before it is read, until the request is built. Used in one event loop.

    When no room is left, the next request waits. The body that has been in reading for longest, and for more than
    `FAIR_SHARE_S`, is then given up, so that slow senders cannot keep others out.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._reading: dict[BodyRoom, None] = {}
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    def room(self, num_bytes: int) -> BodyRoom:
        """Room for a body of at most `num_bytes`; more than the whole budget counts as the whole."""
        return BodyRoom(self, min(num_bytes, self.max_bytes))

    def _has(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.max_bytes

    async def _reserve(self, num_bytes: int, *, is_first: bool = False) -> None:
        """is_first: before all that wait. Raises: Overloaded."""
        if self._has(num_bytes) and (is_first or not self._waiting):
            self.used_bytes += num_bytes
            return
        loop = asyncio.get_running_loop()
        gives_up_at = loop.time() + MAX_WAIT_S
        turn: asyncio.Future[None] = loop.create_future()
        if is_first:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            while self._waiting[0] is not turn or not self._has(num_bytes):
                if loop.time() >= gives_up_at:
                    raise Overloaded(
                        f"the bodies of other requests fill the {self.max_bytes} bytes that may be read at a time"
                    )
                if self._waiting[0] is turn:
                    self._give_up_slowest(loop.time())
                await asyncio.wait((turn,), timeout=_LOOK_AGAIN_S)
                if turn.done():
                    place = self._waiting.index(turn)
                    turn = self._waiting[place] = loop.create_future()
            self.used_bytes += num_bytes
        finally:
            self._waiting.remove(turn)
            self._wake()

    def _release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)

    def _give_up_slowest(self, now: float) -> None:
        slowest = next(iter(self._reading), None)
        if slowest is not None and now - slowest.began_at > FAIR_SHARE_S:
            slowest.give_up()


class BodyRoom:
    """Use as an async context: the room is held inside it. Raises: Overloaded when none is free in time."""

    def __init__(self, budget: BodyBudget, num_bytes: int) -> None:
        self._budget = budget
        self._num_bytes = num_bytes
        self._deadline: asyncio.Timeout | None = None
        self._given_up = False
        self.began_at = 0.0

    async def __aenter__(self) -> BodyRoom:
        await self._budget._reserve(self._num_bytes)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._budget._release(self._num_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Give back all but `num_bytes`, once the body's size is known."""
        if num_bytes < self._num_bytes:
            self._budget._release(self._num_bytes - num_bytes)
            self._num_bytes = num_bytes

    async def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes`, before requests that have no room yet. Raises: Overloaded when as much does not get free in time."""
        num_bytes = min(num_bytes, self._budget.max_bytes)
        if num_bytes > self._num_bytes:
            await self._budget._reserve(num_bytes - self._num_bytes, is_first=True)
            self._num_bytes = num_bytes

    async def read(self, body: Awaitable[T], timeout_s: float | None) -> T:
        """The body. timeout_s: None waits without limit of its own.

        Raises: DeadlineExceeded; Overloaded when others needed the room and this body had been slow.
        """
        reading = self._budget._reading
        self.began_at = asyncio.get_running_loop().time()
        reading[self] = None
        try:
            async with asyncio.timeout(timeout_s) as self._deadline:
                return await body
        except TimeoutError:
            if self._given_up:
                raise Overloaded("the body came too slowly while other requests waited to be read") from None
            if self._deadline is not None and self._deadline.expired():
                raise DeadlineExceeded(f"the request's body did not come within {timeout_s:g} s") from None
            raise
        finally:
            reading.pop(self, None)
            self._deadline = None

    def give_up(self) -> None:
        """End the reading."""
        if self._deadline is not None and not self._given_up:
            self._given_up = True
            self._budget._reading.pop(self, None)
            self._deadline.reschedule(asyncio.get_running_loop().time())
