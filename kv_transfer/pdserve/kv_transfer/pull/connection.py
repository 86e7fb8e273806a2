"""`Connection`: the interface of a connection to one peer, implemented by each connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead


class ConnectionBroken(TransferFailed):
    """The connection cannot be used again. is_unanswered: it broke before a byte of this answer arrived, and did not stall."""

    def __init__(self, message: str, is_unanswered: bool = False) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


class Connection(Protocol):
    """A connection to one peer. One reader thread uses it; only `interrupt` may be called from others."""

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """Read blocks of consecutive indexes into their local blocks; yields the number read so far, while they are in cache.

        The call is made under the queue's lock and only registers the fetch for `interrupt`. The iterator raises ConnectionBroken,
        or another TransferFailed if the peer refuses and the connection remains usable.
        """

    def interrupt(self) -> bool:
        """Make an active fetch end soon, complete or with ConnectionBroken. From any thread; never blocks.

        Returns True if this breaks the connection.
        """

    def close(self) -> None:
        """Free the connection's resources. No read of it writes to the pool after this returns."""
