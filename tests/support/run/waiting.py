"""How tests wait for what must come, and after how long they call it a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

HANG_S = 60.0
"""A wait that takes longer is a hang. It bounds no speed: a machine that others keep busy needs some seconds for what takes
0.1 s alone. Half of pytest's own limit, so that the message of the wait is what fails a test. Bounds that the product promises
are tested with twice the bound instead."""
T = TypeVar("T")


async def eventually(
    look: Callable[[], T | None], what: str | Callable[[], object] = "", *, pause_s: float = 0.005
) -> T:
    """Wait until `look` returns something true and return that.

    what: the awaited thing, for messages. pause_s: seconds between two looks. Raises: AssertionError.
    """
    give_up_at = time.monotonic() + HANG_S
    while not (found := look()):
        assert time.monotonic() < give_up_at, _message(what)
        await asyncio.sleep(pause_s)
    return found


def wait_until(look: Callable[[], T | None], what: str | Callable[[], object] = "") -> T:
    """The same in a thread of its own, or before a loop runs."""
    give_up_at = time.monotonic() + HANG_S
    while not (found := look()):
        assert time.monotonic() < give_up_at, _message(what)
        time.sleep(0.005)
    return found


def _message(what: str | Callable[[], object]) -> str:
    return f"not within {HANG_S} s: {what if isinstance(what, str) else what()}"
