"""`UseOrder`: the order in which a tier gives up its blocks: GreedyDual with frequency, for blocks of one size."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count

_SPARE_ENTRIES = 64


class UseOrder:
    """Names, each with a rank: the clock at its last use, plus its uses. The lowest goes first, and of equal ones the least
    recently used; the clock then is at that rank. So a block that was used often stays longer than one that was used once,
    and goes in the end if it is used no more.

    All blocks of one tier and shape have the same size and stand for the same number of tokens: use is what their value per byte
    differs by. Every operation takes logarithmic time in the mean.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, tuple[int, int]] = {}
        """Name -> (rank, number of the use)."""
        self._uses: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        """(rank, number of the use, name); entries that `_places` lacks count for nothing."""
        self._numbers = count()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._places)

    def use(self, name: bytes) -> None:
        """Note a use; the first one adds the name."""
        self._uses[name] = uses = self._uses.get(name, 0) + 1
        self._places[name] = place = (self._clock + uses, next(self._numbers))
        if len(self._heap) > 2 * len(self._places) + _SPARE_ENTRIES:
            self._heap = [(*known, each) for each, known in self._places.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (*place, name))

    def remove(self, name: bytes) -> None:
        """Raises: KeyError."""
        del self._places[name], self._uses[name]

    def take_first(self, is_free: Callable[[bytes], bool]) -> bytes | None:
        """Remove the first name for which `is_free` is true; None if there is none."""
        passed = []
        found = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            rank, number, name = entry
            if self._places.get(name) != (rank, number):
                continue
            if not is_free(name):
                passed.append(entry)
                continue
            found, self._clock = name, rank
            self.remove(name)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def clear(self) -> None:
        """Remove all."""
        self._places.clear()
        self._uses.clear()
        self._heap.clear()
