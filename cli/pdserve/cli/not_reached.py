"""`NotReached`: no service answers at the address that a client was given."""

from __future__ import annotations

from pdserve.common.errors import PeerError


class NotReached(PeerError):
    """The connection was refused or not made in time, so no request was sent. The command ends as for a wrong setting."""
