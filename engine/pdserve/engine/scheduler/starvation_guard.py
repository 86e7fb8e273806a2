"""`StarvationGuard`: who may not be passed any more.

A sequence that finds no room is passed by others that find some. Twice that ends: while a preempted sequence waits, no
new work of its priority or a worse one gets room; and whoever heads a queue and has been passed `max_overtakes` times
by later arrivals is *overdue*: nothing of its priority or a worse one gets new blocks until it has its own.
Sequences that hold blocks already go on, end, and so make that room.
"""

from __future__ import annotations

from pdserve.engine.request import Request
from pdserve.engine.scheduler.request_queue import RequestQueue


class StarvationGuard:
    """Shared by all who give out room: admission, and receives from other workers."""

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._queues: list[RequestQueue] = []
        self.preempted = RequestQueue()
        """Sequences that lost their blocks and come before all new work."""
        self.overdue = RequestQueue()
        """Those that nothing passes any more; each is in the queue that it waits in as well."""

    def watch(self, queue: RequestQueue) -> RequestQueue:
        """Count how often its head is passed."""
        self._queues.append(queue)
        return queue

    def placed(self, request: Request) -> None:
        """It got room: whoever is at the head of a queue and came earlier was passed."""
        self.overdue.remove(request)
        for queue in self._queues:
            head = queue.peek()
            if head is not None and head.arrival < request.arrival and head.priority <= request.priority:
                head.num_overtaken += 1
                if head.num_overtaken == self._max_overtakes:
                    self.overdue.append(head)

    def ended(self, request: Request) -> None:
        """It does not wait for room any more. Harmless when it did not."""
        self.overdue.remove(request)

    def must_wait(self, request: Request) -> bool:
        """Whether this new work must let somebody go first, though there may be room."""
        return any(
            first is not None and first is not request and first.priority <= request.priority
            for first in (self.preempted.peek(), self.overdue.peek())
        )
