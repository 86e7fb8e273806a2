"""`FairQueue`: items of several tenants, within a tenant by priority and arrival, tenants in turn by what they were served.

Each tenant has a counter of what it was served, in the unit that callers charge (tokens, bytes). The tenant with the lowest
counter is next. A tenant that returns after a pause starts at the counter of the tenant served last, so that a pause neither
saves up for a burst nor costs anything. So tenants that always wait are served equally, whatever their items cost and however
many they send; one that asks for less than its share waits for one item at most.

Deficit round robin gives the same shares if costs are known when an item is taken. Here the output of a request is
known only at its end, so costs are charged as they arise and a counter may be corrected at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from pdserve.common.priority_queue import PriorityQueue

T = TypeVar("T")


class _TenantQueue(Generic[T]):
    """One tenant's."""

    __slots__ = ("arrived", "items", "served")

    def __init__(self) -> None:
        self.items = PriorityQueue[T]()
        self.served = 0.0
        self.arrived = 0
        """Breaks ties: of equals the tenant that has waited longer goes first."""


class FairQueue(Generic[T]):
    """Items by unique keys. With t tenants that wait, looking at the first items costs O(t)."""

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue[T]] = {}
        self._waiting: dict[str, _TenantQueue[T]] = {}
        self._tenant_of: dict[Hashable, str] = {}
        self._now = 0.0
        """Counter of the tenant that was served last, when it was; never falls."""
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    @property
    def num_tenants(self) -> int:
        """Tenants with an item here."""
        return len(self._waiting)

    def num_of(self, tenant: str) -> int:
        """Items of one tenant."""
        queue = self._waiting.get(tenant)
        return len(queue.items) if queue is not None else 0

    def append(self, tenant: str, key: Hashable, item: T, priority: int = 0) -> None:
        """Behind the tenant's items of the same priority; lower priorities go first. key: not in the queue yet."""
        queue = self._queues.setdefault(tenant, _TenantQueue())
        if tenant not in self._waiting:
            queue.served = max(queue.served, self._now)
            self._arrivals += 1
            queue.arrived = self._arrivals
            self._waiting[tenant] = queue
        queue.items.append(key, item, priority)
        self._tenant_of[key] = tenant

    def remove(self, key: Hashable) -> bool:
        """Take it out unserved; False when it was not here."""
        tenant = self._tenant_of.pop(key, None)
        if tenant is None:
            return False
        queue = self._queues[tenant]
        queue.items.remove(key)
        if not queue.items:
            del self._waiting[tenant]
        return True

    def take(self, key: Hashable, cost: float) -> None:
        """Take an item out to serve it. cost: charged to its tenant."""
        tenant = self._tenant_of[key]
        queue = self._queues[tenant]
        self._now = max(self._now, queue.served)
        queue.served += cost
        self._arrivals += 1
        queue.arrived = self._arrivals
        self.remove(key)

    def charge(self, tenant: str, cost: float) -> None:
        """Correct what a tenant was served. cost: below 0 for what was charged and not used."""
        if (queue := self._queues.get(tenant)) is not None:
            queue.served += cost

    def first(self, count: int, per_tenant: int = 1, among: Callable[[str], bool] = lambda tenant: True) -> list[T]:
        """At most `count` items in the order of their turns, at most `per_tenant` of each tenant.

        among: whether a tenant's items count.
        """
        queues = (queue for tenant, queue in self._waiting.items() if among(tenant))
        items: list[T] = []
        for queue in heapq.nsmallest(count, queues, key=lambda queue: (queue.served, queue.arrived)):
            items += queue.items.first(min(per_tenant, count - len(items)))
            if len(items) >= count:
                break
        return items
