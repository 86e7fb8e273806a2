"""`service_tier`, OpenAI's classes of requests: one that runs ahead, and one that waits for all others."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.request_body import shown
from pdserve.router.tenants.client import Client

FLEX = "flex"
"""The class that waits for others, and that a full router refuses first."""
DEFAULT = "default"
TIER_PRIORITIES: Mapping[str, int] = {"priority": -1000, FLEX: 1000}
"""Class -> its `priority`, which becomes the nearest value that the API key allows."""
_WITHOUT_CLASS = ("auto", DEFAULT, "scale")


def verify_service_tier(tier: str | None, priority: int | None) -> None:
    """priority: that of the body, which a class sets too. Raises: InvalidRequest."""
    if tier is None or tier in _WITHOUT_CLASS:
        return
    if tier not in TIER_PRIORITIES:
        known = ", ".join((*_WITHOUT_CLASS, *TIER_PRIORITIES))
        raise InvalidRequest(f"service_tier is {shown(tier)}, one of {known} is needed", "service_tier")
    if priority is not None:
        raise InvalidRequest(
            f"service_tier is {shown(tier)} and priority {priority}: one of them is to be given", "service_tier"
        )


def used_tier(tier: str | None, priority: int, client: Client, scheduling_policy: str) -> tuple[str | None, int]:
    """The tier that a request gets, None if it asks for none, and its priority.

    priority: that without a class, in the range of the client's key. scheduling_policy: the router's; under `fcfs` no class has a
    priority. `priority` becomes `default` where it would not run ahead; `flex` remains, since it is refused first everywhere.
    """
    if tier is None or tier not in TIER_PRIORITIES:
        return None if tier is None else DEFAULT, priority
    default = priority
    if scheduling_policy == "priority":
        priority = client.nearest_priority(TIER_PRIORITIES[tier])
    return tier if tier == FLEX or priority < default else DEFAULT, priority
