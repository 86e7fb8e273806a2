"""The protocol between services: the size of its messages, its version, and which versions work together.

A service works with its own version, the one before and the one after: during an upgrade two generations serve together.
Version 1 did not authenticate, so nothing works with it any more. Version 3 added `Identity.sampler_version`. Version 4 carries
requests as `generation_request` (`request/request_bytes.py`); towards version 3 they are generated messages
(`request/protocol_3.py`).
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of one gRPC message, at most."""
PROTOCOL_VERSION = 4
"""Raised by one with each change that older services do not support; comments describe the version before."""
STEP_STREAM_VERSION = 1
"""Version of `StepStreamService`, announced by workers apart from the protocol's: routers call it where it equals theirs."""
OLDEST_AUTHENTICATED = 2
MAX_DISTANCE = 1


def version_objection(theirs: int, ours: int = PROTOCOL_VERSION) -> str | None:
    """Why a service of version `theirs` is refused by one of version `ours`, naming both; None when they work together."""
    if theirs < OLDEST_AUTHENTICATED:
        return (
            f"it speaks protocol version {theirs}, which does not authenticate; version {OLDEST_AUTHENTICATED} or newer "
            f"is needed, this service speaks {ours}"
        )
    if not works_with(theirs, ours):
        return f"it speaks protocol version {theirs}, this service {ours}; they may differ by {MAX_DISTANCE} at most"
    return None


def works_with(one: int, other: int) -> bool:
    """True if two services of these versions may serve one request together."""
    return min(one, other) >= OLDEST_AUTHENTICATED and abs(one - other) <= MAX_DISTANCE
