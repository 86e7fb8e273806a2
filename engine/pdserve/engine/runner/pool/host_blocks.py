"""`HostBlocks`: the bytes of the host-memory tier, and the copies between it, the pool, and the store below it.

Stores run in the order of the steps: a step that writes a block is queued after the copy of its former content. Loads run in a
thread, on a device in a stream of their own, so steps of other sequences do not wait for them. What a load reads from the store is
read before, in another thread, into a buffer: only bytes that were verified get into the pool.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from pdserve.common import clock
from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import InternalError
from pdserve.engine.runner.device.device_runtime import DeviceRuntime, TimedEvent, make_runtime
from pdserve.engine.runner.pool.block_store import SealedStore
from pdserve.engine.scheduler_output import CopyEnd, LookupEnd, SchedulerOutput
from pdserve.engine.sequence_blocks import BlockCounts
from pdserve.models.kv_cache import make_host_memory, pools_of

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that a call of the store may take after the end of its engine, before the engine is closed without it."""
CLEAR_LOOK_S = 0.1
"""Seconds between two looks if the engine has ended, while the store is cleared."""
Work = queue.SimpleQueue[Callable[[], object] | None]
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
        self,
        kv_caches: Sequence[Tensor],
        host_caches: Sequence[Tensor],
        runtime: DeviceRuntime | None = None,
        store: SealedStore | None = None,
    ) -> None:
        """kv_caches: by KV cache group. host_caches: by shape of blocks. runtime: default: the pools' device's. store: below host
        memory; None without one."""
        self._pools = pools_of(kv_caches)
        self._host_caches = host_caches
        self._runtime = runtime or make_runtime(kv_caches[0].device)
        self._store = store
        self._begun: Work = queue.SimpleQueue()
        self._reads: Work = queue.SimpleQueue()
        self._writes: Work = queue.SimpleQueue()
        self._lookups: Work = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[CopyEnd | LookupEnd | Exception] = queue.SimpleQueue()
        self._buffers: dict[int, Tensor] = {}
        """By shape, for a block that is read."""
        self._is_closing = False
        self._closing = threading.Lock()
        """Held while a block is copied that was read: a read may outlive the engine, and the pool then has another one."""
        names = {"kv-loads": self._begun}
        if store is not None:
            names |= {"kv-reads": self._reads, "kv-writes": self._writes, "kv-lookups": self._lookups}
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name=name, daemon=True) for name, work in names.items()
        ]
        for thread in self._threads:
            thread.start()

    @torch.inference_mode()
    def copy(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        """As `Executor.copy_blocks`."""
        if scheduled.kv_stores:
            _copy_all(list(zip(self._pools, self._host_caches, scheduled.kv_stores, strict=True)))
        # the blocks that are loaded may have been written by steps before, and read by the stores
        copied = self._runtime.event()
        if scheduled.kv_clear:
            is_clear = threading.Event()
            self._writes.put(partial(self._clear, is_clear))
            # what is looked up from now on is not what was there before
            self._lookups.put(partial(self._wait_for, is_clear))
        for copy_id, wanted in scheduled.kv_lookups.items():
            self._lookups.put(partial(self._look_up, copy_id, wanted))
        for copy_id, (name, (shape, slot)) in scheduled.kv_writes.items():
            self._writes.put(partial(self._write, copy_id, name, self._host_caches[shape][slot], copied))
        for load_id, by_shape in scheduled.kv_loads.items():
            copies = list(zip(self._host_caches, self._pools, by_shape, strict=True))
            load = partial(self._load, load_id, copies, copied)
            if reads := scheduled.kv_reads.get(load_id):
                self._reads.put(partial(self._read, load_id, reads, copied, load))
            else:
                self._begun.put(load)
        return None if self._runtime.is_synchronous else copied

    def finished(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        """As `Executor.finished_copies`."""
        ended: list[CopyEnd | LookupEnd] = []
        while True:
            try:
                end = self._ended.get(timeout=timeout_s) if timeout_s and not ended else self._ended.get_nowait()
            except queue.Empty:
                return ended
            if isinstance(end, Exception):
                raise end
            ended.append(end)

    def close(self) -> None:
        """End the threads, after what each of them copies; what has begun besides is dropped. A call of the store that does not
        return is left to itself. May be called again."""
        with self._closing:
            self._is_closing = True
        for work in (self._begun, self._reads, self._writes, self._lookups):
            work.put(None)
        end_at = clock.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_at - clock.monotonic()))
        if self._store is not None:
            self._store.store.close()

    @property
    def _stored(self) -> SealedStore:
        if self._store is None:
            raise InternalError("copies to a store of blocks, and there is none")
        return self._store

    @torch.inference_mode()
    def _work(self, work: Work) -> None:
        while (copy := work.get()) is not None and not self._is_closing:
            try:
                copy()
            except Exception as error:
                self._ended.put(error)

    def _load(self, load_id: int, copies: Copies, after: TimedEvent) -> None:
        self._runtime.copy_beside(after, partial(_copy_all, copies))
        self._ended.put(CopyEnd(load_id))

    def _read(
        self, load_id: int, reads: Sequence[tuple[bytes, int, int]], after: TimedEvent, load: Callable[[], None]
    ) -> None:
        """load: the rest of the load, which is copied from host memory."""
        lost = []
        for name, shape, row in reads:
            target = self._pools[shape][row]
            if shape not in self._buffers:
                self._buffers[shape] = self._runtime.host_memory(target.numel() * target.element_size())
            block = self._buffers[shape]
            if not self._stored.read(name, _bytes_of(block)):
                lost.append(name)
                continue
            source = block.view(target.dtype).view(1, *target.shape)
            copies = partial(_copy_all, [(source, self._pools[shape], [(0, row)])])
            with self._closing:
                if self._is_closing:
                    return
                self._runtime.copy_beside(after, copies)
        if lost:
            self._ended.put(CopyEnd(load_id, is_whole=False, lost=lost))
        else:
            self._begun.put(load)

    def _clear(self, is_clear: threading.Event) -> None:
        try:
            self._stored.store.clear()
        except OSError as error:
            # the store finds none of them any more; after a restart their names are those of the same tokens
            log.warning("not all blocks of the store could be removed: %s", error)
        finally:
            is_clear.set()

    def _wait_for(self, is_clear: threading.Event) -> None:
        while not self._is_closing and not is_clear.wait(CLEAR_LOOK_S):
            pass

    def _look_up(self, copy_id: int, names: Sequence[bytes]) -> None:
        try:
            end = LookupEnd(copy_id, self._stored.store.find(names))
        except OSError:
            end = LookupEnd(copy_id, is_answered=False)
        self._ended.put(end)

    def _write(self, copy_id: int, name: bytes, slot: Tensor, after: TimedEvent) -> None:
        after.synchronize()
        lost = self._stored.write(name, _bytes_of(slot))
        self._ended.put(CopyEnd(copy_id, is_whole=name not in lost, lost=lost))


def _copy_all(copies: Copies) -> None:
    # a block is one run of bytes on both sides; torch releases the interpreter lock for each
    for source, target, pairs in copies:
        for source_row, target_row in pairs:
            target[target_row].copy_(source[source_row], non_blocking=True)


def _bytes_of(memory: Tensor) -> memoryview:
    """The bytes of contiguous main memory."""
    return memory.reshape(-1).view(torch.uint8).numpy().data
