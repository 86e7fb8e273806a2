"""`Connection`: one connected way to one peer, as a lane uses it. Each lane-based connector has its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead


class ConnectionBroken(TransferFailed):
    """The wire is of no more use. `stale`: it had served before, and broke before a byte of this answer came."""

    def __init__(self, message: str, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class Connection(Protocol):
    """A connected way to one peer; used by one lane, save for `interrupt`."""

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """Bring consecutive indexes into their local blocks; yields how many came so far, while they are in cache.

        Called under the queue's lock: does nothing yet but note that an `interrupt` from now on is meant for it.
        Raises, when asked for a number: WireBroken, or another TransferFailed when the peer refuses and the wire is still
        good.
        """

    def interrupt(self) -> bool:
        """End a fetch under way soon, with WireBroken or because all has come. From any thread; never blocks.

        Returns whether the wire is broken by it.
        """

    def close(self) -> None:
        """Give up what the wire holds. When it returns, nothing that the wire was asked for is written any more."""
