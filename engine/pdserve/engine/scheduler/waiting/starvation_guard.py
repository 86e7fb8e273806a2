"""`StarvationGuard`: bounds how often waiting sequences are passed by others in a `RequestQueue`.

Later sequences may pass one that does not fit, with two limits. While a preempted sequence waits, no new sequence of the same or a
lower priority gets blocks. If later arrivals have passed the first of a queue `max_overtakes` times, it is *overdue*: no sequence
of the same or a lower priority gets new blocks before it.

Sequences that already hold blocks continue; they end and free blocks.
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
        """Insert before all requests of the same priority."""
        self._requests.prepend(request.request_id, request, request.priority)

    def remove(self, request: Request) -> bool:
        """Remove a request; False if it is not in the queue."""
        return self._requests.remove(request.request_id)

    def first(self, count: int) -> list[Request]:
        """The first `count` requests, which bound the cost of a step."""
        return self._requests.first(count)

    def peek(self) -> Request | None:
        return self._requests.peek()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._requests


class StarvationGuard:
    """Shared by `WaitingQueues` and `RemoteKvQueue`, which both allocate blocks to waiting sequences."""

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._queues: list[RequestQueue] = []
        self.preempted = RequestQueue()
        """Preempted sequences, which precede all new ones."""
        self.overdue = RequestQueue()
        """Overdue sequences; each is also in its own queue."""

    def watch(self, queue: RequestQueue) -> RequestQueue:
        """Count how often the first request of a queue is passed."""
        self._queues.append(queue)
        return queue

    def placed(self, request: Request) -> None:
        """Note that a sequence got blocks, and so passed earlier arrivals that are first in their queues."""
        self.overdue.remove(request)
        for queue in self._queues:
            head = queue.peek()
            if head is not None and head.arrival < request.arrival and head.priority <= request.priority:
                head.num_overtaken += 1
                if head.num_overtaken == self._max_overtakes:
                    self.overdue.append(head)

    def ended(self, request: Request) -> None:
        """Forget a sequence that no longer waits for blocks; no effect if it did not wait."""
        self.overdue.remove(request)

    def must_wait(self, request: Request) -> bool:
        """True if a new sequence must wait for another one although it would fit."""
        return any(
            first is not None and first is not request and first.priority <= request.priority
            for first in (self.preempted.peek(), self.overdue.peek())
        )
