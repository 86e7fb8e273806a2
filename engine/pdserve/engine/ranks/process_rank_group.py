"""`ProcessRankGroup`: a `RankGroup` of processes, over torch.distributed: gloo on a CPU, NCCL on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

LOADING_S = 3600.0
"""Seconds that a rank waits for one that is still loading its weights; an ended rank is noticed at once."""
_LOOPBACK = "lo"
_LOOK_EVERY_S = 0.02
dist: Any = _distributed_c10d
"""Groups made here stand in no table of the process; type stubs lack them."""


class ProcessRankGroup:
    """Not torch's default group, which belongs to the program that uses the engine. Used by one thread at a time."""

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        device: torch.device,
        require_all: Callable[[], None] | None = None,
    ) -> None:
        """Meet the other ranks. store: a file that does not exist, in a folder of only this user. require_all: called while one is
        waited for; raises when it has ended. Raises: RuntimeError, and as `require_all`.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._wait = timedelta(seconds=LOADING_S)
        files = dist.FileStore(str(store), size)
        if require_all is not None:
            self._wait_for_all(files, require_all)
        else:
            files.set(f"rank {rank}", "is here")
        self._group: Any = self._nccl(files) if device.type == "cuda" else self._gloo(files)
        self._set_options()

    def _wait_for_all(self, store: Any, require_all: Callable[[], None]) -> None:
        """Until the other ranks' processes run: torch's own wait would not end with one of them."""
        others = [f"rank {rank}" for rank in range(1, self.size)]
        while not store.check(others):
            require_all()
            time.sleep(_LOOK_EVERY_S)

    def _gloo(self, store: Any) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface=_LOOPBACK)]
        options._timeout = self._wait
        options._threads = 1
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _nccl(self, store: Any) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._wait
        torch.cuda.set_device(self._device)
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def limit_waits(self, wait_s: float) -> None:
        """From now on an operation fails when another rank has not arrived after this time."""
        self._wait = timedelta(seconds=wait_s)
        self._set_options()

    def _set_options(self) -> None:
        self._sum, self._least = dist.AllreduceOptions(), dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN
        self._gather, self._allgather, self._broadcast = (
            dist.GatherOptions(),
            dist.AllgatherOptions(),
            dist.BroadcastOptions(),
        )
        for options in (self._sum, self._least, self._gather, self._allgather, self._broadcast):
            options.timeout = self._wait

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._device.type == "cuda" or self.size == 2:
            # of two terms, the order does not matter
            self._group.allreduce([x], self._sum).wait()
            return x
        # gloo's order of the terms depends on a number's place in the tensor; here it is that of the ranks
        terms = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([terms], [x], self._allgather).wait()
        torch.add(terms[0], terms[1], out=x)
        for term in terms[2:]:
            x += term
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        self._group.gather([] if parts is None else [parts], [x], self._gather).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        self._group.broadcast([x], self._broadcast).wait()
        return x

    def minimum(self, value: int) -> int:
        number = torch.tensor([value], device=self._device)
        self._group.allreduce([number], self._least).wait()
        return int(number)

    def abort(self) -> None:
        """End operations on a GPU that wait for a rank which has ended; gloo notices by itself. Any thread may call it."""
        if self._device.type == "cuda":
            self._group.abort()
