"""`HostBlocks`: the bytes of the host-memory tier, and the copies between it and the pool.

Stores run in the order of the steps: a step that writes a block is queued after the copy of its former content. Loads run in a
thread, on a device in a stream of their own, so steps of other sequences do not wait for them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.runner.device.device_runtime import DeviceRuntime, TimedEvent, make_runtime
from pdserve.engine.scheduler_output import SchedulerOutput
from pdserve.engine.sequence_blocks import BlockCounts
from pdserve.models.kv_cache import make_host_memory, pools_of

Copies = Sequence[tuple[Tensor, Tensor, Sequence[tuple[int, int]]]]
"""(from, to, pairs of their rows), by shape of blocks."""


def make_host_caches(pools: Sequence[Tensor], num_slots: BlockCounts) -> tuple[Tensor, ...]:
    """Slots for blocks of each pool `[num_blocks, ...]`: zeros `[num_slots, ...]` in main memory, pinned for a GPU.

    pools, num_slots: by shape of blocks.
    """
    caches = []
    for pool, count in zip(pools, num_slots, strict=True):
        num_bytes = count * pool[0].numel() * pool.element_size()
        is_on_cpu = pool.device.type == "cpu"
        memory = make_host_memory(num_bytes) if is_on_cpu else make_runtime(pool.device).host_memory(num_bytes)
        caches.append(memory.view(pool.dtype).view(count, *pool.shape[1:]))
    return tuple(caches)


class HostBlocks:
    """One executor's slots. The engine thread calls `copy` and `finished`."""

    def __init__(
        self, kv_caches: Sequence[Tensor], host_caches: Sequence[Tensor], runtime: DeviceRuntime | None = None
    ) -> None:
        """kv_caches: by KV cache group. host_caches: by shape of blocks. runtime: default: the pools' device's."""
        self._pools = pools_of(kv_caches)
        self._host_caches = host_caches
        self._runtime = runtime or make_runtime(kv_caches[0].device)
        self._begun: queue.SimpleQueue[tuple[int, Copies, TimedEvent] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._load, name="kv-loads", daemon=True)
        self._thread.start()

    @torch.inference_mode()
    def copy(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        """As `Executor.copy_blocks`."""
        if scheduled.kv_stores:
            _copy_all(list(zip(self._pools, self._host_caches, scheduled.kv_stores, strict=True)))
        # the blocks that are loaded may have been written by steps before, and read by the stores
        copied = self._runtime.event()
        for load_id, by_shape in scheduled.kv_loads.items():
            copies = list(zip(self._host_caches, self._pools, by_shape, strict=True))
            self._begun.put((load_id, copies, copied))
        return None if self._runtime.is_synchronous else copied

    def finished(self, timeout_s: float) -> list[int]:
        """As `Executor.finished_loads`."""
        ended: list[int] = []
        while True:
            try:
                load = self._ended.get(timeout=timeout_s) if timeout_s and not ended else self._ended.get_nowait()
            except queue.Empty:
                return ended
            if isinstance(load, Exception):
                raise load
            ended.append(load)

    def close(self) -> None:
        """End the thread, after the load that it copies; others that have begun are dropped. May be called again."""
        self._is_closing = True
        self._begun.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _load(self) -> None:
        while (begun := self._begun.get()) is not None and not self._is_closing:
            load_id, copies, after = begun
            try:
                self._runtime.copy_beside(after, partial(_copy_all, copies))
            except Exception as error:
                self._ended.put(error)
            else:
                self._ended.put(load_id)


def _copy_all(copies: Copies) -> None:
    # a block is one run of bytes on both sides; torch releases the interpreter lock for each
    for source, target, pairs in copies:
        for source_row, target_row in pairs:
            target[target_row].copy_(source[source_row], non_blocking=True)
