"""`Client`: the owner of a request, identified by its API key."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import verify_priority
from pdserve.common.settings.api_key_file import UNLIMITED, KeyLimits, Role


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The API key's name, its tenant, and their rights."""

    key_name: str = ""
    """Name of the API key; "" if none is required."""
    tenant: str = ""
    """The tenant whose prefix cache, limits and fair share apply; "" if no key is required, so that all clients are one tenant."""
    role: Role = "user"
    limits: KeyLimits = UNLIMITED
    address: str = ""
    """IP address of the peer; "" if it is not known."""

    @property
    def sees_all(self) -> bool:
        """True if the client may see all tenants' requests."""
        return self.role == "operator"

    def may_ask(self, model: str) -> bool:
        """True if requests may give this name as `model`."""
        return self.limits.models is None or model in self.limits.models

    def allowed_priority(self, priority: int) -> int:
        """The priority of a request: 0, the default, becomes the nearest allowed value.

        Raises: InvalidRequest for another value outside the key's range.
        """
        verify_priority(priority)
        nearest = self.nearest_priority(priority)
        if priority and nearest != priority:
            low, high = self.limits.min_priority, self.limits.max_priority
            raise InvalidRequest(f"priority is {priority}, this API key allows {low} to {high}", "priority")
        return nearest

    def nearest_priority(self, priority: int) -> int:
        """The nearest value in the key's range."""
        return min(max(priority, self.limits.min_priority), self.limits.max_priority)


class CacheGroup(msgspec.Struct, frozen=True):
    """Tenants whose requests may use each other's cached prefixes."""

    name: str = ""
    """Part of the root of block hashes, so that requests of different groups share no blocks."""
    is_shared: bool = False
    """True if it has several tenants. Clients then get 0 cached tokens, since the count would reveal other tenants' prompts."""


ANYBODY = Client(role="operator")
"""The client of a router that requires no key."""
ASKING: ContextVar[Client | None] = ContextVar("asking", default=None)
"""The authenticated client of the request of this task, for records of refused requests."""
