"""`HeldLoads`: an executor whose loads from the tiers, and writes and lookups of the store, end when a test lets them.

Until then the blocks of loads hold rubbish, and the slots that loads and writes read must keep their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.executor.executor import Executor, StepResult
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, SchedulerOutput

RUBBISH = 77_777_777


class HeldLoads:
    """Wraps an `Executor`."""

    def __init__(self, executor: Executor, pools: Sequence[Tensor], host_caches: Sequence[Tensor]) -> None:
        """pools, host_caches: by shape of blocks."""
        assert host_caches, "no host-memory tier"
        self._executor = executor
        self._pools, self._host_caches = pools, host_caches
        self.held: dict[int, SchedulerOutput] = {}
        """Loads, writes and lookups that have begun and not ended, by copy id, each as a step of its own."""
        self._content: dict[int, list[Tensor]] = {}
        """Bytes at the beginning of the slots that they read."""
        self._ended: list[CopyEnd | LookupEnd] = []
        self.num_begun = 0
        self.num_loaded = Counter[int]()
        """Shape -> blocks of loads that have begun."""
        self.holds = True
        """False: loads end at once."""

    @property
    def hidden_size(self) -> int:
        return self._executor.hidden_size

    @property
    def kv_written(self) -> DeviceEvent | None:
        return self._executor.kv_written

    def check_health(self) -> None:
        self._executor.check_health()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self._executor.execute_model(scheduled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        return self._executor.sample_tokens(grammar)

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        event = self._executor.copy_blocks(SchedulerOutput(kv_stores=scheduled.kv_stores, kv_clear=scheduled.kv_clear))
        for copy_id, names in scheduled.kv_lookups.items():
            self._hold(copy_id, SchedulerOutput(kv_lookups={copy_id: names}))
        for copy_id, write in scheduled.kv_writes.items():
            self._hold(copy_id, SchedulerOutput(kv_writes={copy_id: write}))
        for copy_id, by_shape in scheduled.kv_loads.items():
            self.num_begun += 1
            reads = {copy_id: scheduled.kv_reads[copy_id]} if copy_id in scheduled.kv_reads else {}
            load = SchedulerOutput(kv_loads={copy_id: by_shape}, kv_reads=reads)
            self._hold(copy_id, load)
            for shape, row in _rows(load):
                self.num_loaded[shape] += 1
                self._pools[shape][row] = RUBBISH
        return event

    def _hold(self, copy_id: int, copy: SchedulerOutput) -> None:
        assert copy_id not in self.held
        self.held[copy_id] = copy
        self._content[copy_id] = [self._host_caches[shape][slot].clone() for shape, slot in _slots(copy)]

    def release(self, copy_ids: Iterable[int] | None = None) -> None:
        """End these loads, writes and lookups; default: all."""
        for copy_id in list(self.held) if copy_ids is None else list(copy_ids):
            copy = self.held.pop(copy_id)
            for (shape, slot), content in zip(_slots(copy), self._content.pop(copy_id), strict=True):
                assert self._host_caches[shape][slot].equal(content), f"slot {slot} was written while it was read"
            for shape, row in _rows(copy):
                assert (self._pools[shape][row] == RUBBISH).all(), f"row {row} was written while a load wrote it"
            self._executor.copy_blocks(copy)
            self._ended += self._executor.finished_copies(60)

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        if not self.holds:
            self.release()
        ended, self._ended = self._ended, []
        return ended

    def take_num_begun(self) -> int:
        """Number of loads that have begun since the last call."""
        num_begun, self.num_begun = self.num_begun, 0
        return num_begun

    def warm_up(self) -> None:
        self._executor.warm_up()

    def close(self) -> None:
        self._executor.close()


def _slots(copy: SchedulerOutput) -> list[tuple[int, int]]:
    """(shape, slot) of the blocks that a load or a write reads in host memory."""
    loaded = [(shape, slot) for shape, slot, _ in _loaded(copy)]
    return loaded + [slot for _, slot in copy.kv_writes.values()]


def _rows(copy: SchedulerOutput) -> list[tuple[int, int]]:
    """(shape, row) of the blocks that a load writes."""
    read = [(shape, row) for blocks in copy.kv_reads.values() for _, shape, row in blocks]
    return [(shape, row) for shape, _, row in _loaded(copy)] + read


def _loaded(copy: SchedulerOutput) -> list[tuple[int, int, int]]:
    """(shape, slot, row) of each block that comes from host memory."""
    return [
        (shape, slot, row)
        for by_shape in copy.kv_loads.values()
        for shape, pairs in enumerate(by_shape)
        for slot, row in pairs
    ]
