"""Messages between a router process and its parent, which counts the requests of all processes (`ChildAdmission`)."""

from __future__ import annotations

import msgspec

from pdserve.router.admission.place import Cost
from pdserve.router.tenants.client import Client

ENTER = "admission.enter"
LEAVE = "admission.leave"
PLACE = "admission.place"
PLACED = "admission.placed"
PRODUCED = "admission.produced"
END_PLACE = "admission.end_place"
OPEN_SESSION = "admission.open_session"
CLOSE_SESSION = "admission.close_session"
CAPACITY = "admission.capacity"


class Enter(msgspec.Struct, array_like=True, frozen=True):
    """Call `ENTER`: requests that arrived; `LEAVE` with their number ends them."""

    number: int
    """Unique among those of this process."""
    client: Client
    num_requests: int
    num_sequences: int
    timeout_s: float | None
    flex_id: str = ""


class AskPlace(msgspec.Struct, array_like=True, frozen=True):
    """Call `PLACE`, answered with the grant; `END_PLACE` ends the wait or the place."""

    number: int
    client: Client
    cost: Cost
    priority: int
    flex_id: str = ""


class Produced(msgspec.Struct, array_like=True, frozen=True):
    """Output tokens of a place since the last such message, in `PRODUCED` and `END_PLACE`."""

    number: int
    num_tokens: int


class OpenSession(msgspec.Struct, array_like=True, frozen=True):
    """Call `OPEN_SESSION`; `CLOSE_SESSION` with its number ends it."""

    number: int
    client: Client
