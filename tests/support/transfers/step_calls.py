"""The cost of a scheduler's step, counted in function calls instead of seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.engine.engine_harness import Harness


def calls_in(engine: Harness, num_steps: int) -> int:
    """Function calls of so many steps, Python's and C's; every turn of a generator is one."""
    count = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # its callbacks are calls too
    try:
        for _ in range(num_steps):
            _profiled_step(engine, profile)
    finally:
        gc.enable()
    return count


def _profiled_step(engine: Harness, profile: Callable[[FrameType, str, Any], None]) -> None:
    """The model's part is not counted."""
    sys.setprofile(profile)
    try:
        scheduled = engine.scheduler.schedule()
    finally:
        sys.setprofile(None)
    assert scheduled.num_scheduled_tokens
    engine.core.executor.execute_model(scheduled)
    computed = engine.core.executor.sample_tokens(engine.scheduler.get_grammar_bitmask(scheduled)).result()
    sys.setprofile(profile)
    try:
        engine.scheduler.update_from_output(scheduled, computed)
        engine.scheduler.outputs.take()
        engine.core.stats()
    finally:
        sys.setprofile(None)
