"""`StarvationGuard`: bounds how often waiting sequences are passed by others in a `RequestQueue`.

A sequence that does not fit is passed by others that do, with two limits. While a preempted sequence waits, no
new work of its priority or a worse one gets blocks. And the first of a queue that later arrivals have passed `max_overtakes`
times is *overdue*: nothing of its priority or a worse one gets new blocks until it has its own.

Sequences that already hold blocks continue, end, and so free blocks.
"""

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


class StarvationGuard:
    """Shared by all who give out room: admission, and receives from other workers."""

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._queues: list[RequestQueue] = []
        self.preempted = RequestQueue()
        """Sequences that lost their blocks and precede all new work."""
        self.overdue = RequestQueue()
        """Sequences that nothing passes any more; each is also in its own queue."""

    def watch(self, queue: RequestQueue) -> RequestQueue:
        """Count how often its head is passed."""
        self._queues.append(queue)
        return queue

    def placed(self, request: Request) -> None:
        """The sequence got blocks: earlier arrivals at the heads of queues were passed."""
        self.overdue.remove(request)
        for queue in self._queues:
            head = queue.peek()
            if head is not None and head.arrival < request.arrival and head.priority <= request.priority:
                head.num_overtaken += 1
                if head.num_overtaken == self._max_overtakes:
                    self.overdue.append(head)

    def ended(self, request: Request) -> None:
        """The sequence no longer waits for blocks. Harmless when it did not."""
        self.overdue.remove(request)

    def must_wait(self, request: Request) -> bool:
        """True if this new work must wait for another sequence although it would fit."""
        return any(
            first is not None and first is not request and first.priority <= request.priority
            for first in (self.preempted.peek(), self.overdue.peek())
        )
