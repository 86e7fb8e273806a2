"""`SharedAdmission`: admission of one of several router processes. Their parent counts and decides for all (`ChildAdmission`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from pdserve.common.tasks.first_done import first_of
from pdserve.router.admission import admission_calls as calls
from pdserve.router.admission.open_requests import OpenRequests, leaving, once
from pdserve.router.admission.place import Capacity, Cost, RunningPlace
from pdserve.router.process_link import CALL_S, ProcessLink
from pdserve.router.tenants.client import ANYBODY, Client

TOKENS_PER_MESSAGE = 64
"""Output tokens of a request after which the parent is told of them, and once more at its end."""


class RequestAdmission(Protocol):
    """The operations of `Admission` and `SharedAdmission` that requests use; `Admission` describes them."""

    @property
    def num_requests(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    async def admit(
        self,
        num_requests: int,
        expel: Callable[[], None],
        *,
        client: Client = ANYBODY,
        num_sequences: int | None = None,
        timeout_s: float | None = None,
        flex_id: str = "",
    ) -> None: ...

    def leave(
        self,
        num_requests: int,
        expel: Callable[[], None],
        *,
        client: Client = ANYBODY,
        num_sequences: int | None = None,
        flex_id: str = "",
    ) -> None: ...

    def place(
        self,
        cost: Cost,
        priority: int = 0,
        raise_when_no_worker: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        client: Client = ANYBODY,
        flex_id: str = "",
    ) -> contextlib.AbstractAsyncContextManager[RunningPlace]: ...

    async def begin_session(self, client: Client = ANYBODY) -> Callable[[], None]: ...

    def recheck(self) -> None: ...


class SharedPlace:
    """A place that the parent has granted."""

    def __init__(self, link: ProcessLink, number: int) -> None:
        self._link = link
        self._number = number
        self._is_placed = False
        self._unsent = 0

    def placed(self) -> None:
        if not self._is_placed:
            self._is_placed = True
            self._link.send(calls.PLACED, self._number)

    def produced(self, num_tokens: int) -> None:
        self._unsent += num_tokens
        if self._unsent >= TOKENS_PER_MESSAGE:
            self._link.send(calls.PRODUCED, calls.Produced(self._number, self._unsent))
            self._unsent = 0

    def end(self) -> None:
        self._link.send(calls.END_PLACE, calls.Produced(self._number, self._unsent))


class SharedAdmission(OpenRequests):
    """Calls the parent once when a request enters, and once for its place."""

    def __init__(self, link: ProcessLink, capacity: Callable[[], Capacity], queue_timeout_s: float) -> None:
        """capacity: what the workers can serve, as this process knows it. queue_timeout_s: the parent's limit of a wait."""
        super().__init__()
        self._link = link
        self._capacity = capacity
        self._queue_timeout_s = queue_timeout_s
        self._reported: Capacity | None = None
        self._numbers = itertools.count(1)
        self._entered: dict[Callable[[], None], int] = {}
        """`expel` of each request -> number under which it entered."""

    async def admit(
        self,
        num_requests: int,
        expel: Callable[[], None],
        *,
        client: Client = ANYBODY,
        num_sequences: int | None = None,
        timeout_s: float | None = None,
        flex_id: str = "",
    ) -> None:
        """As `Admission.enter`. Raises: also Draining when the parent has ended."""
        # counted before the answer, so that a drain waits for it
        self.count(num_requests, expel)
        number = self._entered[expel] = next(self._numbers)
        sequences = num_requests if num_sequences is None else num_sequences
        try:
            entering = calls.Enter(number, client, num_requests, sequences, timeout_s, flex_id)
            await self._link.call(calls.ENTER, entering, type(None))
            if self.closed:
                raise leaving()
        except BaseException:
            self.leave(num_requests, expel)
            raise

    def leave(
        self,
        num_requests: int,
        expel: Callable[[], None],
        *,
        client: Client = ANYBODY,
        num_sequences: int | None = None,
        flex_id: str = "",
    ) -> None:
        self._link.send(calls.LEAVE, self._entered.pop(expel))
        self.count_out(num_requests, expel)

    @contextlib.asynccontextmanager
    async def place(
        self,
        cost: Cost,
        priority: int = 0,
        raise_when_no_worker: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        client: Client = ANYBODY,
        flex_id: str = "",
    ) -> AsyncIterator[SharedPlace]:
        """As `Admission.place`. Raises: also Draining when the parent has ended."""
        self.recheck()
        place = SharedPlace(self._link, number := next(self._numbers))
        asked = calls.AskPlace(number, client, cost, priority, flex_id)
        asking = self._link.call(calls.PLACE, asked, type(None), self._queue_timeout_s + CALL_S)
        try:
            if raise_when_no_worker is None:
                await asking
            else:
                granted, no_worker = asyncio.ensure_future(asking), asyncio.ensure_future(raise_when_no_worker())
                async with first_of(granted, no_worker):
                    (granted if granted.done() else no_worker).result()
            yield place
        finally:
            place.end()

    async def begin_session(self, client: Client = ANYBODY) -> Callable[[], None]:
        """As `Admission.open_session`. Raises: also Draining when the parent has ended."""
        if self.closed:
            raise leaving()
        number = next(self._numbers)
        close = once(lambda: self._link.send(calls.CLOSE_SESSION, number))
        try:
            await self._link.call(calls.OPEN_SESSION, calls.OpenSession(number, client), type(None))
        except BaseException:
            close()
            raise
        return close

    def recheck(self) -> None:
        """Report a changed capacity, upon which the parent grants places."""
        if (capacity := self._capacity()) != self._reported:
            self._reported = capacity
            self._link.send(calls.CAPACITY, capacity)
