"""`HostBlocks`: the copies between the pool, the host-memory tier, and the store below it.

Stores run in the order of the steps: a step that writes a block is queued after the copy of its former content. Loads run in a
queue, on a device in a stream of their own, so steps of other sequences do not wait for them. What a load reads from the store is
read before, in another queue, into a buffer: only bytes that were verified get into the pool.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import InternalError
from pdserve.engine.runner.pool.block_store import SealedStore
from pdserve.engine.runner.pool.copy_queues import CopyQueues, ThreadQueues
from pdserve.engine.runner.pool.tier_memory import TierMemory
from pdserve.engine.scheduler_output import CopyEnd, LookupEnd, SchedulerOutput
from pdserve.engine.sequence_blocks import RowPairs

log = logging.getLogger(__name__)

_LOADS, _READS, _WRITES, _LOOKUPS = "kv-loads", "kv-reads", "kv-writes", "kv-lookups"


class HostBlocks:
    """One executor's. The engine thread calls `copy` and `finished`."""

    def __init__(
        self,
        memory: TierMemory,
        store: SealedStore | None = None,
        make_queues: Callable[[Sequence[str]], CopyQueues] = ThreadQueues,
    ) -> None:
        """store: below host memory; None without one. make_queues: takes their names."""
        self._memory = memory
        self._store = store
        self._num_clears = 0
        """Asked for and not yet made; under `_closing`."""
        self._is_closing = False
        self._closing = threading.Lock()
        """Held while a block is copied that was read: a read may outlive the engine, and the pool then has another one."""
        self._queues = make_queues([_LOADS] if store is None else [_LOADS, _READS, _WRITES, _LOOKUPS])

    def copy(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        """As `Executor.copy_blocks`."""
        # the blocks that are loaded may have been written by steps before, and read by the stores
        copied = self._memory.store(scheduled.kv_stores)
        if scheduled.kv_clear:
            with self._closing:
                self._num_clears += 1
            self._queues.put(_WRITES, self._clear)
        for copy_id, wanted in scheduled.kv_lookups.items():
            self._queues.put(_LOOKUPS, partial(self._look_up, copy_id, wanted))
        for copy_id, (name, (shape, slot)) in scheduled.kv_writes.items():
            self._queues.put(_WRITES, partial(self._write, copy_id, name, shape, slot, copied))
        for load_id, by_shape in scheduled.kv_loads.items():
            load = partial(self._load, load_id, by_shape, copied)
            if reads := scheduled.kv_reads.get(load_id):
                self._queues.put(_READS, partial(self._read, load_id, reads, copied, load))
            else:
                self._queues.put(_LOADS, load)
        return None if self._memory.is_synchronous else copied

    def finished(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        """As `Executor.finished_copies`."""
        return self._queues.take(timeout_s)

    def close(self) -> None:
        """End the queues, as `CopyQueues.close`, and the store. May be called again."""
        with self._closing:
            self._is_closing = True
        self._queues.close()
        if self._store is not None:
            self._store.store.close()

    @property
    def _stored(self) -> SealedStore:
        if self._store is None:
            raise InternalError("copies to a store of blocks, and there is none")
        return self._store

    def _load(self, load_id: int, by_shape: RowPairs, after: DeviceEvent) -> None:
        self._memory.load(by_shape, after)
        self._queues.end(CopyEnd(load_id))

    def _read(
        self, load_id: int, reads: Sequence[tuple[bytes, int, int]], after: DeviceEvent, load: Callable[[], None]
    ) -> None:
        """load: the rest of the load, which is copied from host memory."""
        lost = []
        for name, shape, row in reads:
            if not self._stored.read(name, self._memory.buffer(shape)):
                lost.append(name)
                continue
            with self._closing:
                if self._is_closing:
                    return
                self._memory.load_buffer(shape, row, after)
        if lost:
            self._queues.end(CopyEnd(load_id, is_whole=False, lost=lost))
        else:
            self._queues.put(_LOADS, load)

    def _clear(self) -> None:
        try:
            self._stored.store.clear()
        except OSError as error:
            # the store finds none of them any more; after a restart their names are those of the same tokens
            log.warning("not all blocks of the store could be removed: %s", error)
        finally:
            with self._closing:
                self._num_clears -= 1

    def _look_up(self, copy_id: int, names: Sequence[bytes]) -> None:
        try:
            # what the store has before it is cleared is given up
            end = LookupEnd(copy_id, [] if self._num_clears else self._stored.store.find(names))
        except OSError:
            end = LookupEnd(copy_id, is_answered=False)
        self._queues.end(end)

    def _write(self, copy_id: int, name: bytes, shape: int, slot: int, after: DeviceEvent) -> None:
        lost = self._stored.write(name, self._memory.slot(shape, slot, after))
        self._queues.end(CopyEnd(copy_id, is_whole=name not in lost, lost=lost))
