"""`FairQueue`: items of several tenants; the least served tenant is next, and within a tenant priority and arrival decide.

Each tenant has a counter of its service, in the unit that callers charge (tokens, bytes). The tenant with the lowest counter is
next. A tenant that returns after a pause starts at the counter of the tenant served last, so a pause gives neither credit nor debt.
Tenants that always wait are therefore served equally, for any cost and number of items; a tenant that uses less than its share
waits for at most one item.

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
    """The items of one tenant."""

    __slots__ = ("arrived", "items", "served")

    def __init__(self) -> None:
        self.items = PriorityQueue[T]()
        self.served = 0.0
        self.arrived = 0
        """Order of arrival; of tenants with equal counters the one that has waited longer is first."""


class FairQueue(Generic[T]):
    """Items by unique keys. With t waiting tenants, finding the first items costs O(t)."""

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue[T]] = {}
        self._waiting: dict[str, _TenantQueue[T]] = {}
        self._tenant_of: dict[Hashable, str] = {}
        self._now = 0.0
        """Counter of the last served tenant at that time; never decreases."""
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
        """Insert after the tenant's items of the same priority; lower values are first. key: must not be in the queue."""
        if (queue := self._queues.get(tenant)) is None:
            queue = self._queues[tenant] = _TenantQueue()
        if tenant not in self._waiting:
            queue.served = max(queue.served, self._now)
            self._arrivals += 1
            queue.arrived = self._arrivals
            self._waiting[tenant] = queue
        queue.items.append(key, item, priority)
        self._tenant_of[key] = tenant

    def remove(self, key: Hashable) -> bool:
        """Remove an item without serving it; False if it is not in the queue."""
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
        """Add to a tenant's counter. cost: below 0 to return an unused charge."""
        if (queue := self._queues.get(tenant)) is not None:
            queue.served += cost

    def first(self, count: int, per_tenant: int = 1, among: Callable[[str], bool] = lambda tenant: True) -> list[T]:
        """At most `count` items in the order of their turns, at most `per_tenant` of each tenant.

        among: returns True for tenants to include.
        """
        queues = (queue for tenant, queue in self._waiting.items() if among(tenant))
        items: list[T] = []
        for queue in heapq.nsmallest(count, queues, key=lambda queue: (queue.served, queue.arrived)):
            items += queue.items.first(min(per_tenant, count - len(items)))
            if len(items) >= count:
                break
        return items
