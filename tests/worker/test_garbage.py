"""A full garbage collection of a worker does not look through what was loaded at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes.forked_process import ForkedProcess
from tests.support.run.waiting import HANG_S


@pytest.mark.process
def test_what_was_loaded_is_not_looked_through_again(tiny_checkpoints: Callable[..., Path]) -> None:
    script, folder = Path(__file__).with_name("ready_worker.py"), tiny_checkpoints("llama")
    said, output = os.pipe()
    worker = ForkedProcess([str(script), str(folder)], output=output, errors=2, environ=os.environ)
    os.close(output)
    with os.fdopen(said) as lines:
        assert int(lines.readline()) < 10_000
    assert worker.wait(HANG_S) == 0
