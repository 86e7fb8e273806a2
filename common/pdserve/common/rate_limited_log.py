"""`RateLimitedLog`: warnings about peers, at most one per peer and minute, however often a peer gives cause."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from pdserve.common import clock

EVERY_S = 60.0
MAX_KEYS = 1024
"""Peers that are distinguished; beyond them the one with the oldest warning is forgotten."""


class RateLimitedLog:
    """Warns at most once per interval and key, with the number of warnings left out. Bounded memory."""

    def __init__(
        self, log: logging.Logger, every_s: float = EVERY_S, *, clock: Callable[[], float] = clock.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._warned: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Key -> time of the last warning, and the number left out since."""

    def warning(self, key: str, message: str, *args: object) -> None:
        """Log it, unless there was one with this key within `every_s`. key: names the peer, and the kind of warning."""
        now = self._clock()
        at, num_left_out = self._warned.get(key, (-self._every_s, 0))
        if now - at < self._every_s:
            self._warned[key] = at, num_left_out + 1
            return
        self._warned[key] = now, 0
        self._warned.move_to_end(key)
        if len(self._warned) > MAX_KEYS:
            self._warned.popitem(last=False)
        more = f" ({num_left_out} more since the last such warning)" if num_left_out else ""
        self._log.warning(f"{message}%s", *args, more)
