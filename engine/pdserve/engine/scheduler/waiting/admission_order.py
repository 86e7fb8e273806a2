"""`AdmissionOrder`: which waiting sequences a step tries, and when it stops to try those that have no blocks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pdserve.engine.request import Request


@dataclass(eq=False)
class AdmissionOrder:
    """Sequences of several queues by priority, those of equal priority in the order of the queues. Iterated once.

    Lists are taken when the order is made; queues may change between two sequences. Only those that are tried cost anything.
    """

    queues: Sequence[Sequence[Request]]
    """Each by priority."""
    ready: Sequence[Request]
    """Sequences that hold blocks; one of the queues."""
    look_ahead: int
    """Number of sequences without room that may be passed by ones that hold no blocks."""
    num_without_room: int = 0
    """Number of sequences that had no room, counted by the caller."""

    def __iter__(self) -> Iterator[Request]:
        tried: set[str] = set()
        for request in heapq.merge(*self.queues, key=attrgetter("priority")):
            if self.num_without_room > self.look_ahead:
                break
            if request.request_id not in tried:  # an overdue sequence is in its own queue, too
                tried.add(request.request_id)
                yield request
        yield from (request for request in self.ready if request.request_id not in tried)
