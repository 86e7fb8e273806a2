"""`RequestQueue`: requests in the order in which they will be tried."""

from __future__ import annotations

from pdserve.common.priority_queue import PriorityQueue
from pdserve.engine.request import Request


class RequestQueue:
    """Lowest `Request.priority` first, then first come, first served; any request can be removed."""

    def __init__(self) -> None:
        self._requests = PriorityQueue[Request]()

    def append(self, request: Request) -> None:
        self._requests.append(request.request_id, request, request.priority)

    def insert(self, request: Request) -> None:
        """Insert before those at the end of the queue that arrived later and have the same priority."""
        self._requests.insert(
            request.request_id, request, request.priority, lambda other: request.arrival < other.arrival
        )

    def prepend(self, request: Request) -> None:
        """Ahead of those of the same priority."""
        self._requests.prepend(request.request_id, request, request.priority)

    def remove(self, request: Request) -> bool:
        """Take it out; False when it was not here."""
        return self._requests.remove(request.request_id)

    def first(self, count: int) -> list[Request]:
        """The first `count` requests: what one step looks at, however many wait behind them."""
        return self._requests.first(count)

    def peek(self) -> Request | None:
        return self._requests.peek()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._requests
