"""The protocol between services: the size of its messages, its version, and which versions work together.

Version 1 is that of release 0.1.0. A service works with its own version, the one before and the one after: during an upgrade two
generations serve together.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one gRPC message, at most."""
PROTOCOL_VERSION = 1
"""Raised by one with each change that older services do not support."""
OLDEST_VERSION = 1
MAX_DISTANCE = 1


def version_objection(theirs: int, ours: int = PROTOCOL_VERSION) -> str | None:
    """Why a service of version `theirs` is refused by one of version `ours`, naming both; None when they work together."""
    if theirs < OLDEST_VERSION:
        return f"it speaks protocol version {theirs}, which no release has; this service speaks {ours}"
    if not works_with(theirs, ours):
        return f"it speaks protocol version {theirs}, this service {ours}; they may differ by {MAX_DISTANCE} at most"
    return None


def works_with(one: int, other: int) -> bool:
    """True if two services of these versions may serve one request together."""
    return min(one, other) >= OLDEST_VERSION and abs(one - other) <= MAX_DISTANCE
