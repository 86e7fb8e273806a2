"""`NotReached`: no service answers at the address that a client was given."""

from __future__ import annotations

from pdserve.common.errors import PeerError


class NotReached(PeerError):
    """The connection was refused or not made in time, so nothing was asked: an address that cannot be used, like a setting."""
