"""`FailedAttempts`: counts failed authentications per address, logs them at a limited rate, and delays their responses."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from pdserve.common import clock
from pdserve.common.address.peer_address import network_of

log = logging.getLogger(__name__)

FREE_FAILURES = 5
"""Failures of one address within `FORGET_S` that are not delayed."""
FIRST_DELAY_S = 0.1
"""Seconds of delay of the next failure; doubles with each further one."""
LONGEST_DELAY_S = 2.0
FORGET_S = 60.0
"""Seconds without a failure after which an address starts again from zero."""
LOG_EVERY_S = 10.0
"""Least seconds between two log lines about one address."""
MAX_LINES_PER_MINUTE = 60
"""Most log lines about all addresses per minute."""
MAX_ADDRESSES = 4096
"""Most addresses that are kept; the one with the oldest failure is dropped first."""
MAX_DELAYED = 256
"""Most responses that are delayed at the same time; further ones are sent at once, because each keeps a connection open."""


class _Failures(msgspec.Struct):
    count: int = 0
    num_unlogged: int = 0
    last_s: float = 0.0
    logged_s: float = float("-inf")


class FailedAttempts:
    """Failed authentications of one router. Only failures are delayed, not valid keys from the same address."""

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self._clock = clock
        self._by_network: OrderedDict[str, _Failures] = OrderedDict()
        self._num_delayed = 0
        self._minute, self._num_lines = 0, 0

    def add(self, address: str, why: str) -> float:
        """Count a failure. address: IP address, or "" if unknown.

        Returns the delay of the response in seconds.
        """
        now, network = self._clock(), network_of(address)
        failures = self._by_network.setdefault(network, _Failures())
        self._by_network.move_to_end(network)
        if now - failures.last_s > FORGET_S:
            failures.count = 0
        failures.count, failures.last_s = failures.count + 1, now
        failures.num_unlogged += 1
        if now - failures.logged_s >= LOG_EVERY_S and self._may_log(now):
            log.warning(
                "%d failed authentication(s) from %s: %s", failures.num_unlogged, network or "an unknown address", why
            )
            failures.num_unlogged, failures.logged_s = 0, now
        while len(self._by_network) > MAX_ADDRESSES:
            self._by_network.popitem(last=False)
        num_slowed = failures.count - FREE_FAILURES
        return 0.0 if num_slowed <= 0 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_slowed - 1, 16))

    async def hold_back(self, delay_s: float) -> None:
        """Wait before a response is sent, unless `MAX_DELAYED` responses wait."""
        if delay_s <= 0 or self._num_delayed >= MAX_DELAYED:
            return
        self._num_delayed += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._num_delayed -= 1

    def _may_log(self, now: float) -> bool:
        minute = int(now // 60)
        if minute != self._minute:
            self._minute, self._num_lines = minute, 0
        self._num_lines += 1
        return self._num_lines <= MAX_LINES_PER_MINUTE
