"""`LateExecutor`: an executor whose steps write the KV pool as late as a GPU may.

A step on a GPU returns before its kernels have run. Here a step's bytes stay aside until its event is waited for, or until the next
step is launched, which runs after it.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.executor.executor import Executor, StepResult
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, SchedulerOutput
from pdserve.kv_transfer.memory.device_pool import DevicePool


class LateEvent:
    """The end of one step's writes. Thread-safe."""

    def __init__(self, kv_cache: Tensor, before: Tensor) -> None:
        self._lock = threading.Lock()
        self._kv_cache = kv_cache
        self._changed = (kv_cache != before).nonzero(as_tuple=True)
        self._written = kv_cache[self._changed]
        self._is_done = False
        kv_cache.copy_(before)

    def synchronize(self) -> None:
        with self._lock:
            if not self._is_done:
                self._kv_cache[self._changed] = self._written
                self._is_done = True


class LateExecutor:
    """Wraps an `Executor` over one pool.

    The writes of a step are found by comparison, so blocks are moved into the pool between steps. pool: where they arrive.
    """

    def __init__(self, executor: Executor, kv_cache: Tensor, pool: DevicePool | None = None) -> None:
        self._executor = executor
        self._kv_cache = kv_cache
        self._computing = threading.Lock()
        self.kv_written: LateEvent | None = None
        if pool is not None:
            move_in = pool.move_in

            def move_in_between_steps(*arguments: Any) -> None:
                with self._computing:
                    move_in(*arguments)

            pool.move_in = move_in_between_steps  # type: ignore[assignment, method-assign]

    @property
    def hidden_size(self) -> int:
        return self._executor.hidden_size

    def check_health(self) -> None:
        self._executor.check_health()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        if self.kv_written is not None:
            self.kv_written.synchronize()
        with self._computing:
            before = self._kv_cache.clone()
            self._executor.execute_model(scheduled)
            self.kv_written = LateEvent(self._kv_cache, before)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        return self._executor.sample_tokens(grammar)

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        """Stores run after the steps before, as everything else on a GPU; loads arrive between steps."""
        if self.kv_written is not None:
            self.kv_written.synchronize()
        return self._executor.copy_blocks(scheduled)

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        return self._executor.finished_copies(timeout_s)

    def warm_up(self) -> None:
        self._executor.warm_up()

    def close(self) -> None:
        self._executor.close()
