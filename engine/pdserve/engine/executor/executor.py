"""`Executor`: computes the scheduler's steps, on one or more devices.

A step is two calls, as in vLLM: `execute_model` begins it, `sample_tokens` returns its result. In between, the engine collects the
token masks of grammars, which other processes compute meanwhile.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.runner.pool.host_blocks import HostBlocks
from pdserve.engine.scheduler_output import CopyEnd, GrammarOutput, LookupEnd, ModelRunnerOutput, SchedulerOutput


class StepResult(Protocol):
    """The result of a step, maybe still being computed; a `concurrent.futures.Future` is one."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it; called once, in the order of the steps. Raises: the exception of the step."""


class Executor(Protocol):
    """Called by the engine thread, with plain values; never calls the scheduler."""

    @property
    def hidden_size(self) -> int:
        """Hidden size H, the largest length of an embedding."""

    @property
    def kv_written(self) -> DeviceEvent | None:
        """On a GPU, the event after which the KV of all steps so far is in the pool; None on a CPU, where KV is written at
        once."""

    def check_health(self) -> None:
        """Raises: WorkerLost when a process that takes part has ended."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Begin a step. `sample_tokens` must follow before the next one."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        """The step's result. grammar: None if no sequence of the step needs a mask.

        With `EngineConfig.async_scheduling` the next `execute_model` may come before the result is waited for, but not the next
        `sample_tokens`.
        """

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        """Copy `kv_stores`, and begin `kv_loads`, `kv_writes` and `kv_lookups`, before `execute_model` of the step, if it follows.

        Returns on a GPU the event after which the stores have ended; None on a CPU, where they have.
        """

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        """Loads, writes and lookups that have ended since the last call; waits at most `timeout_s` seconds for the first.

        Raises: the exception of a copy. That the store does not have a block, or does not answer, is none.
        """

    def warm_up(self) -> None:
        """Prepare what later steps replay. Called once, before the first request and after steps of every kind."""

    def close(self) -> None:
        """Free resources. No step may be running. May be called again."""


class SingleDeviceExecutor:
    """Runs one model on one device, in the calling thread."""

    def __init__(self, runner: ModelRunner, host_blocks: HostBlocks | None = None) -> None:
        """host_blocks: the host-memory tier's bytes, if there is one."""
        self.runner = runner
        self._host_blocks = host_blocks

    @property
    def hidden_size(self) -> int:
        return self.runner.hidden_size

    @property
    def kv_written(self) -> DeviceEvent | None:
        return self.runner.kv_written

    def check_health(self) -> None:
        """No effect."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.runner.execute_model(scheduled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        return self.runner.sample_tokens(grammar)

    def copy_blocks(self, scheduled: SchedulerOutput) -> DeviceEvent | None:
        if self._host_blocks is None:
            raise RuntimeError("copies to a host-memory tier, and there is none")
        return self._host_blocks.copy(scheduled)

    def finished_copies(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        return [] if self._host_blocks is None else self._host_blocks.finished(timeout_s)

    def warm_up(self) -> None:
        self.runner.capture_graphs()

    def close(self) -> None:
        if self._host_blocks is not None:
            self._host_blocks.close()
