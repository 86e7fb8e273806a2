"""Ranks of a tensor-parallel model in threads of one process: the operations of a `RankGroup` meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from tests.support.run.waiting import HANG_S

T = TypeVar("T")


class _Meeting:
    """Each operation: all ranks put a tensor, and all read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=HANG_S)
        self.given: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = [tensor.clone() for tensor in self.given]
        self.barrier.wait()
        assert len({(tensor.shape, tensor.dtype) for tensor in found}) == 1, "ranks are at different operations"
        return found


class ThreadRank:
    """Implements `RankGroup` for one thread."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.num_operations = 0

    @property
    def size(self) -> int:
        return self._meeting.size

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.num_operations += 1
        return self._meeting.exchange(self.rank, x)

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x  # as gloo does, without the other ranks
        first, *others = self._exchange(x)
        for other in others:
            first += other
        return x.copy_(first)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        found = self._exchange(x)
        return found if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange(x)[0])

    def minimum(self, value: int) -> int:
        return min(int(each) for each in self._exchange(torch.tensor(value)))

    def abort(self) -> None:
        """End the operation of all ranks with an error."""
        self._meeting.barrier.abort()


def thread_ranks(size: int) -> list[ThreadRank]:
    meeting = _Meeting(size)
    return [ThreadRank(meeting, rank) for rank in range(size)]


def on_all_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """The results of `work` on every rank. Raises: the first rank's error that is no consequence of another's."""

    def run(rank: ThreadRank) -> T:
        try:
            return work(rank)
        except BaseException:
            rank.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(run, rank) for rank in thread_ranks(size)]
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in running]
