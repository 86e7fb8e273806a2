"""`follow`: says how a worker's change goes on, until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.common.errors import DeadlineExceeded

_LOOK_EVERY_S = 0.2


def follow(look: Callable[[], str], timeout_s: float, begin: str, late: str) -> None:
    """Print what is left each time that it changes.

    look: returns what is left; "" when the change is done. timeout_s: 0: do not wait. begin, late: beginnings of what is printed,
    and of the error.

    Raises: DeadlineExceeded if it is not done in time; as `look`.
    """
    until, said = time.monotonic() + timeout_s, ""
    while timeout_s and (text := look()):
        if text != said:
            said = text
            print(f"{begin}: {text}", flush=True)
        if time.monotonic() >= until:
            raise DeadlineExceeded(f"{late} within {timeout_s:g} s: {text}")
        time.sleep(_LOOK_EVERY_S)
