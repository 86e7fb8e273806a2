"""Who may come in: a bounded number of requests, and none while the router leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.common.errors import Draining, Overloaded

RETRY_AFTER_S = 1.0


class Admission:
    """Counts the requests in the router."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.closed = False
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._expel: set[Callable[[], None]] = set()
        self.num_requests = 0

    def enter(self, num_requests: int, expel: Callable[[], None]) -> None:
        """expel: called if the router cannot wait for these requests to end.

        Raises: Overloaded, at once, when there is no room; Draining after `close`."""
        if self.closed:
            raise Draining("this router is shutting down")
        if self.num_requests + num_requests > self._max_requests:
            raise Overloaded(
                f"{self.num_requests} requests are in the router and {num_requests} more came; "
                f"its limit is {self._max_requests}",
                RETRY_AFTER_S,
            )
        self.num_requests += num_requests
        self._expel.add(expel)
        self._emptied.clear()

    def leave(self, num_requests: int, expel: Callable[[], None]) -> None:
        """Both arguments as they were given to `enter`."""
        self.num_requests -= num_requests
        self._expel.discard(expel)
        if not self.num_requests:
            self._emptied.set()

    def close(self) -> None:
        """From now on nobody comes in."""
        self.closed = True

    def expel(self) -> None:
        """End the requests that are still in the router."""
        for expel in list(self._expel):
            expel()

    async def emptied(self) -> None:
        """Returns when no request is in the router."""
        await self._emptied.wait()
