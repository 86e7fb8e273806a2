"""`PriorityQueue`: lowest priority value first, then first come, first served; anything may be removed at any time."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Items by unique keys. With p different priorities, adding and removing cost O(log p), amortised.

    Where all priorities are equal, everything is in one ordered dict, and nothing is compared.
    """

    def __init__(self) -> None:
        self._priorities: dict[Hashable, int] = {}
        self._buckets: dict[int, OrderedDict[Hashable, T]] = {}
        """priority -> items in order; one that has become empty stays for a while."""
        self._order: list[int] = []
        """A heap of the keys of `_buckets`."""
        self._num_empty = 0

    def append(self, key: Hashable, item: T, priority: int) -> None:
        """Insert after equal items. key: not in the queue yet."""
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = OrderedDict()
            heapq.heappush(self._order, priority)
        elif not bucket:
            self._num_empty -= 1
        bucket[key] = item
        self._priorities[key] = priority

    def prepend(self, key: Hashable, item: T, priority: int) -> None:
        """Ahead of its equals. key: not in the queue yet."""
        self.append(key, item, priority)
        self._buckets[priority].move_to_end(key, last=False)

    def insert(self, key: Hashable, item: T, priority: int, comes_before: Callable[[T], bool]) -> None:
        """Ahead of those at the end of its equals that it comes before; costs as much as they are. key: not in the queue yet."""
        later = []
        for other_key, other in reversed(self._buckets.get(priority, OrderedDict[Hashable, T]()).items()):
            if not comes_before(other):
                break
            later.append(other_key)
        self.append(key, item, priority)
        for other_key in reversed(later):
            self._buckets[priority].move_to_end(other_key)

    def remove(self, key: Hashable) -> bool:
        """Take it out; False when it was not here."""
        priority = self._priorities.pop(key, None)
        if priority is None:
            return False
        bucket = self._buckets[priority]
        del bucket[key]
        if not bucket:
            self._num_empty += 1
            if 2 * self._num_empty > len(self._order):
                self._sweep()
        return True

    def first(self, count: int) -> list[T]:
        """The first `count` items; the cost grows only with their number."""
        items: list[T] = []
        seen = []
        while self._order and len(items) < count:
            priority = heapq.heappop(self._order)
            if bucket := self._buckets[priority]:
                items += islice(bucket.values(), count - len(items))
                seen.append(priority)
            else:
                del self._buckets[priority]
                self._num_empty -= 1
        for priority in seen:
            heapq.heappush(self._order, priority)
        return items

    def peek(self) -> T | None:
        """The first item; None when there is none."""
        return self.first(1)[0] if self._priorities else None

    def _sweep(self) -> None:
        self._buckets = {priority: bucket for priority, bucket in self._buckets.items() if bucket}
        self._order = list(self._buckets)
        heapq.heapify(self._order)
        self._num_empty = 0

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, key: object) -> bool:
        return key in self._priorities
