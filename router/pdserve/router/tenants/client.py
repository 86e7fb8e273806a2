"""`Client`: the owner of a request, identified by its API key."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.prepared_request import verify_priority
from pdserve.common.settings.api_key_file import UNLIMITED, KeyLimits, Role


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The API key's name, its tenant, and their rights."""

    key_name: str = ""
    """Name of the API key; "" if none is required."""
    tenant: str = ""
    """The tenant whose prefix cache, limits and fair share apply; "" where no key is needed: then all clients are one tenant."""
    role: Role = "user"
    limits: KeyLimits = UNLIMITED
    address: str = ""
    """IP address of the peer; "" if it is not known."""

    @property
    def sees_all(self) -> bool:
        """True if views over all tenants are open to this client."""
        return self.role == "operator"

    def allowed_priority(self, priority: int) -> int:
        """The priority of a request: 0, the default, becomes the nearest allowed value.

        Raises: InvalidRequest for another value outside the key's range.
        """
        verify_priority(priority)
        low, high = self.limits.min_priority, self.limits.max_priority
        if priority and not low <= priority <= high:
            raise InvalidRequest(f"priority is {priority}, this API key allows {low} to {high}", "priority")
        return min(max(priority, low), high)


class CacheGroup(msgspec.Struct, frozen=True):
    """Tenants whose requests may use each other's cached prefixes."""

    name: str = ""
    """Part of the root of the block hashes: requests of two groups never share a block."""
    is_shared: bool = False
    """True if several tenants are in it: a count of cached tokens would reveal their prompts to each other, so clients get 0."""


ANYBODY = Client(role="operator")
"""A client of a router that asks for no key."""
ASKING: ContextVar[Client | None] = ContextVar("asking", default=None)
"""The client of the request that this task serves, once it is authenticated: for records of requests that are refused."""
