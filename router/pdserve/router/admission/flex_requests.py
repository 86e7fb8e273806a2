"""`FlexRequests`: requests that may be ended while they wait, for others to have their room; `Freed`: what that would free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from pdserve.router.admission.place import Waiter


class FlexRequest(msgspec.Struct, eq=False):
    """One that has entered and has not left."""

    tenant: str
    num_requests: int
    num_sequences: int
    waiters: dict[int, Waiter] = {}
    """Its prompts in the queue."""
    has_ended: bool = False
    """True once it was ended: it counts no longer."""

    @property
    def waits(self) -> bool:
        """True if all of it is in the queue: nothing runs, has run or is still prepared."""
        return sum(waiter.cost.num_places for waiter in self.waiters.values()) == self.num_sequences


class FlexRequests:
    """By their ids, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, FlexRequest] = {}

    def enter(self, flex_id: str, tenant: str, num_requests: int, num_sequences: int) -> None:
        self._requests[flex_id] = FlexRequest(tenant, num_requests, num_sequences)

    def leave(self, flex_id: str) -> bool:
        """False if it was ended before, or never entered."""
        request = self._requests.pop(flex_id, None)
        return request is not None and not request.has_ended

    def queued(self, waiter: Waiter) -> None:
        """Note a request that begins to wait; without effect for one that is not flex."""
        if (request := self._requests.get(waiter.flex_id)) is not None:
            request.waiters[id(waiter)] = waiter

    def unqueued(self, waiter: Waiter) -> None:
        """Note that it is not in the queue any more."""
        if (request := self._requests.get(waiter.flex_id)) is not None:
            request.waiters.pop(id(waiter), None)

    def waiting(self) -> list[FlexRequest]:
        """Those that wait, the last to arrive first."""
        return [request for request in reversed(self._requests.values()) if request.waits]


class Freed:
    """Sums over flex requests that wait."""

    def __init__(self, requests: Iterable[FlexRequest] = ()) -> None:
        self.num_sequences = 0
        self.num_queued = 0
        """Their prompts in the queue."""
        self.sequences_of: Counter[str] = Counter()
        """Tenant -> its part of `num_sequences`."""
        self.queued_of: Counter[str] = Counter()
        for request in requests:
            self.add(request)

    def add(self, request: FlexRequest) -> None:
        self.num_sequences += request.num_sequences
        self.num_queued += len(request.waiters)
        self.sequences_of[request.tenant] += request.num_sequences
        self.queued_of[request.tenant] += len(request.waiters)


NOTHING = Freed()
