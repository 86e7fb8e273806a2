"""`Connection`: a connection to one peer, as a reader thread uses it. Each connector has its own kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead


class ConnectionBroken(TransferFailed):
    """The connection cannot be used again. `stale`: it had served before, and broke before a byte of this answer arrived."""

    def __init__(self, message: str, stale: bool = False) -> None:
        super().__init__(message)
        self.stale = stale


class Connection(Protocol):
    """A connection to one peer. One reader thread uses it; only `interrupt` may be called from others."""

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """Read blocks of consecutive indexes into their local blocks; yields the number read so far, while they are in cache.

        Called under the queue's lock: it only notes that an `interrupt` from now on applies to it. The iterator raises
        ConnectionBroken, or another TransferFailed when the peer refuses and the connection remains usable.
        """

    def interrupt(self) -> bool:
        """Make a fetch under way end soon, with ConnectionBroken or because it is complete. From any thread; never blocks.

        Returns whether this breaks the connection.
        """

    def close(self) -> None:
        """Release what the connection holds. When it returns, no read of this connection writes to the pool any more."""
