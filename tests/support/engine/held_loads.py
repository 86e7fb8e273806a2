"""`HeldLoads`: an executor whose loads from the host-memory tier end when a test lets them.

Until then their blocks hold rubbish, and the slots that they read must keep their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.executor.executor import Executor, StepResult
from pdserve.engine.scheduler_output import GrammarOutput, SchedulerOutput
from pdserve.engine.sequence_blocks import RowPairs

RUBBISH = 77_777_777


class HeldLoads:
    """Wraps an `Executor`."""

    def __init__(self, executor: Executor, pools: Sequence[Tensor], host_caches: Sequence[Tensor]) -> None:
        """pools, host_caches: by shape of blocks."""
        assert host_caches, "no host-memory tier"
        self._executor = executor
        self._pools, self._host_caches = pools, host_caches
        self.held: dict[int, RowPairs] = {}
        """Loads that have begun and not ended."""
        self._content: dict[int, list[Tensor]] = {}
        """Their slots' bytes at the beginning."""
        self._ended: list[int] = []
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
        event = self._executor.copy_blocks(SchedulerOutput(kv_stores=scheduled.kv_stores))
        for load_id, copies in scheduled.kv_loads.items():
            assert load_id not in self.held
            self.num_begun += 1
            self.held[load_id] = copies
            self._content[load_id] = [self._host_caches[shape][slot].clone() for shape, slot, _ in _places(copies)]
            for shape, _, row in _places(copies):
                self.num_loaded[shape] += 1
                self._pools[shape][row] = RUBBISH
        return event

    def release(self, load_ids: Iterable[int] | None = None) -> None:
        """End these loads; default: all."""
        for load_id in list(self.held) if load_ids is None else list(load_ids):
            copies = self.held.pop(load_id)
            for (shape, slot, row), content in zip(_places(copies), self._content.pop(load_id), strict=True):
                assert self._host_caches[shape][slot].equal(content), f"slot {slot} was written while a load read it"
                assert (self._pools[shape][row] == RUBBISH).all(), f"row {row} was written while a load wrote it"
            self._executor.copy_blocks(SchedulerOutput(kv_loads={load_id: copies}))
            self._ended += self._executor.finished_loads(60)

    def finished_loads(self, timeout_s: float) -> list[int]:
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


def _places(copies: RowPairs) -> list[tuple[int, int, int]]:
    """(shape, slot, row) of each block."""
    return [(shape, slot, row) for shape, pairs in enumerate(copies) for slot, row in pairs]
