"""`OpenRequests`: the requests of a router, and its end: nothing new enters, and what is left is ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn

from pdserve.common.errors import Draining


class OpenRequests:
    """Used in one event loop."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Prompts that entered and have not left."""
        self._closing = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._expel: dict[Callable[[], None], None] = {}

    @property
    def closed(self) -> bool:
        """True if no request may enter any more."""
        return self._closing.is_set()

    def close(self) -> None:
        """Refuse all requests from now on."""
        self._closing.set()

    async def until_closed(self) -> NoReturn:
        """Wait until `close`, for a front end that waits without a request. Raises: Draining."""
        await self._closing.wait()
        raise leaving()

    def expel(self) -> None:
        """End all requests."""
        for expel in list(self._expel):
            expel()

    async def emptied(self) -> None:
        """Returns when no request is left."""
        await self._emptied.wait()

    def count(self, num_requests: int, expel: Callable[[], None]) -> None:
        """Count requests that have entered. expel: ends them; called by `expel`. Raises: Draining after `close`."""
        if self.closed:
            raise leaving()
        self.num_requests += num_requests
        self._expel[expel] = None
        self._emptied.clear()

    def count_out(self, num_requests: int, expel: Callable[[], None]) -> None:
        """The same arguments as of `count`, after the requests have ended."""
        self.num_requests -= num_requests
        self._expel.pop(expel, None)
        if not self.num_requests:
            self._emptied.set()


def once(end: Callable[[], None]) -> Callable[[], None]:
    """`end` for the first call, and nothing for later ones."""
    stack = contextlib.ExitStack()
    stack.callback(end)
    return stack.close


def leaving() -> Draining:
    return Draining("this router is shutting down")
