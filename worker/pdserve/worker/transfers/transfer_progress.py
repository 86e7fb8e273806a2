"""`TransferProgress`: whether a transfer to this worker waits for its source, for the router of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer

RECEIVING_EVERY_S = 1.0
"""Seconds between reports, and until the first: most transfers have ended by then."""


class TransferProgress:
    """Reports when a transfer has asked for its blocks, when it begins or ceases to wait for its source, and while that publishes.
    Runs in the asyncio thread."""

    def __init__(self, transfer: ReceiverTransfer, report: Callable[[bool], None]) -> None:
        """report: called with `ReceiverTransfer.awaits_source`, at most once per `RECEIVING_EVERY_S`."""
        self._transfer = transfer
        self._report = report
        self._reported = (False, 0)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(RECEIVING_EVERY_S, self._look)

    def close(self) -> None:
        """Report nothing more."""
        self._timer.cancel()

    def _look(self) -> None:
        transfer = self._transfer
        if transfer.is_ending:
            return
        self._timer = self._loop.call_later(RECEIVING_EVERY_S, self._look)
        awaits = transfer.awaits_source
        now = (awaits, transfer.num_published if awaits else 0)
        if now != self._reported:
            self._reported = now
            self._report(awaits)
