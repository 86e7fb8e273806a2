"""Processes of `ProcessClient` that need not import torch, and one whose engine fails. See `forked_process.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pdserve.common.ipc.child_process import ChildProcess
from pdserve.engine.client.engine_process import run_engine_process
from pdserve.engine.executor.executor import SingleDeviceExecutor
from pdserve.worker import engine_process
from pdserve.worker.worker_process import ENGINE_PROGRAM
from tests.support.processes.forked_process import ForkedProcess

ROOT = Path(__file__).resolve().parents[3]

FATAL_TOKEN = 13
"""A prompt that begins with it ends an engine with `BUG`."""
BUG = "a bug in a kernel"


def start_forked(descriptor: int, module: str) -> ChildProcess:
    """In place of `process_client.start_program`."""
    return _start(["-m", module, str(descriptor)], descriptor)


def start_rank(descriptor: int, module: str) -> ChildProcess:
    """In place of `rank_processes.start_program`."""
    return _start(["-m", module, str(descriptor)], descriptor)


def start_failing(descriptor: int, module: str) -> ChildProcess:
    """The same; the engine fails at `FATAL_TOKEN`."""
    return _start(["-m", "tests.support.engine.forked_engine", str(descriptor), module], descriptor)


def _start(program: list[str], descriptor: int) -> ChildProcess:
    environ = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return ForkedProcess(program, output=2, environ=environ, pass_fds=[descriptor])


def fail_at_fatal_token(execute: Any) -> Any:
    """`execute_model` of an executor that fails."""

    def execute_or_fail(executor: Any, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            if new.token_ids[0] == FATAL_TOKEN:
                raise ValueError(BUG)
        execute(executor, scheduled)

    return execute_or_fail


if __name__ == "__main__":
    SingleDeviceExecutor.execute_model = fail_at_fatal_token(SingleDeviceExecutor.execute_model)  # type: ignore[method-assign]
    sys.exit(engine_process.main() if sys.argv[2] == ENGINE_PROGRAM else run_engine_process())
