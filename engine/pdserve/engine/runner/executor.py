"""`Executor`: computes the steps that the scheduler chooses. Where and on how many devices is its own matter.

A step is two calls, as in vLLM: `execute_model` begins it, `sample_tokens` gives its result. In between, the engine collects the
token masks of grammars, which other processes compute meanwhile.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """The engine thread calls it, with values alone: it never calls back into the scheduler."""

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state, which an embedding has at most."""

    @property
    def kv_written(self) -> object | None:
        """On a GPU: the event after which the KV of every step so far is in the pool; None on a processor, where it is."""

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        """Begin a step. `sample_tokens` must follow before the next one."""

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """The step's result, which may come later. grammar: None when no sequence of the step needs a mask."""

    def close(self) -> None:
        """End it; no step is under way. May be called again."""


class SingleDeviceExecutor:
    """One model on one device, in the thread that calls."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def hidden_size(self) -> int:
        return self.runner.hidden_size

    @property
    def kv_written(self) -> object | None:
        return self.runner.kv_written

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.runner.execute_model(scheduled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        result: Future[ModelRunnerOutput] = Future()
        try:
            result.set_result(self.runner.sample_tokens(grammar))
        except Exception as error:
            result.set_exception(error)
        return result

    def close(self) -> None:
        """Nothing to end."""
