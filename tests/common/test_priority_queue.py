"""`PriorityQueue` against a sorted list, and what its operations cost."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.common import priority_queue
from pdserve.common.priority_queue import PriorityQueue

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["append", "prepend", "remove", "first"]), st.integers(0, 9), st.integers(-2, 2)),
    max_size=60,
)


@given(OPERATIONS)
def test_its_order_is_that_of_a_sorted_list(operations: list[tuple[str, int, int]]) -> None:
    queue = PriorityQueue[int]()
    places: dict[int, tuple[int, int]] = {}
    for turn, (operation, key, priority) in enumerate(operations, 1):
        if operation == "remove":
            assert queue.remove(key) == (places.pop(key, None) is not None)
        elif operation == "first":
            assert queue.first(key) == sorted(places, key=lambda key: places[key])[:key]
        elif key not in places:
            getattr(queue, operation)(key, key, priority)
            places[key] = (priority, turn if operation == "append" else -turn)
        order = sorted(places, key=lambda key: places[key])
        assert (len(queue), queue.peek()) == (len(order), order[0] if order else None)
        assert (key in queue) == (key in places)
    assert queue.first(99) == sorted(places, key=lambda key: places[key])


class _CountedHeap:
    """`heapq` that adds up the comparisons its operations may need."""

    def __init__(self) -> None:
        self.num_comparisons = 0.0

    def heappush(self, heap: list[int], item: int) -> None:
        self.num_comparisons += math.log2(len(heap) + 2)
        heapq.heappush(heap, item)

    def heappop(self, heap: list[int]) -> int:
        self.num_comparisons += math.log2(len(heap) + 2)
        return heapq.heappop(heap)

    def heapify(self, heap: list[int]) -> None:
        self.num_comparisons += len(heap)
        heapq.heapify(heap)


@pytest.mark.parametrize("num_priorities", [1, 7, 10_000])
@pytest.mark.parametrize("reverse", [False, True])
def test_adding_and_removing_cost_the_logarithm(
    monkeypatch: pytest.MonkeyPatch, num_priorities: int, reverse: bool
) -> None:
    counted = _CountedHeap()
    monkeypatch.setattr(priority_queue, "heapq", counted)
    queue = PriorityQueue[int]()
    count = 10_000
    for key in range(count):
        queue.append(key, key, key % num_priorities)
    for key in sorted(range(count), reverse=reverse):  # aborted, never looked at
        assert queue.remove(key)
    assert counted.num_comparisons <= 4 * count * math.log2(num_priorities + 2)
    assert len(queue._order) == len(queue._buckets) <= 1, "nothing of what is gone stays"


def test_looking_at_the_first_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for count in (100, 10_000):
        queue = PriorityQueue[int]()
        for key in range(count):
            queue.append(key, key, key % 5)
        counted = _CountedHeap()
        with monkeypatch.context() as patch:
            patch.setattr(priority_queue, "heapq", counted)
            assert queue.first(8) == [5 * place for place in range(8)]
        costs.append(counted.num_comparisons)
    assert costs[0] == costs[1]
