"""`ResponseStore`: responses that `previous_response_id` and `GET /v1/responses/{id}` find again, for each tenant apart.

Without Redis they are in this router's memory. A store holds at most `max_stored_responses_per_tenant` responses and
`max_stored_bytes_per_tenant` of each tenant, drops its oldest first, and drops all after `max_stored_response_age_s`. A response
of more than `max_stored_response_bytes` is not stored.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdserve.common import clock
from pdserve.common.errors import NotFound
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.bodies.request_body import shown

_ID = re.compile(r"resp_[0-9a-f]{32}")
_OVERHEAD_BYTES = 1024
"""Bytes that a response takes in addition to its content."""


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that has ended."""

    response: bytes
    """The response as JSON, without log-probabilities."""
    items: bytes
    """A JSON list of the whole conversation: items of earlier responses, the input, the output."""
    num_input: int
    """Items before the output."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD_BYTES


class ResponseStore(Protocol):
    """Another tenant's response is not found, as if there were none. tenant: "" if no key is required."""

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Raises: PeerError if the store cannot be reached."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it is too large (`is_stored`). Raises nothing: an answer does not depend on it."""

    async def delete(self, tenant: str, response_id: str) -> bool:
        """True if there was one. Raises: as `get`."""

    async def close(self) -> None: ...


def is_response_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def is_stored(stored: StoredResponse, settings: RouterSettings) -> bool:
    """True if the settings allow a response of this size."""
    return settings.limits.max_stored_responses_per_tenant > 0 and stored.num_bytes <= most_bytes(settings)


def most_bytes(settings: RouterSettings) -> int:
    """Bytes of one response, at most."""
    return min(settings.limits.max_stored_response_bytes, settings.limits.max_stored_bytes_per_tenant)


def not_stored(response_id: str) -> NotFound:
    """The same for every reason, so that nothing is learnt about other tenants."""
    return NotFound(
        f"response {shown(response_id)} is not stored here: there was none, it was made with store false or did not end, "
        "or it was deleted, or dropped for its age or for newer ones"
    )


class MemoryResponseStore:
    """Responses in this process, at most `max_stored_bytes` of all tenants: the tenant that has most loses its oldest first."""

    def __init__(self, settings: RouterSettings, clock: Callable[[], float] = clock.monotonic) -> None:
        """clock: seconds."""
        self._settings = settings
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._by_age: OrderedDict[tuple[str, str], float] = OrderedDict()
        """(tenant, id) -> time of its end."""
        self.num_bytes = 0

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._expire()
        held = self._tenants.get(tenant)
        return held.responses.get(response_id) if held is not None else None

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        settings = self._settings
        self._expire()
        most_of_tenant = min(settings.limits.max_stored_bytes_per_tenant, settings.limits.max_stored_bytes)
        if not is_stored(stored, settings) or stored.num_bytes > most_of_tenant:
            return
        held = self._tenants.setdefault(tenant, _Tenant())
        held.responses[response_id] = stored
        held.num_bytes += stored.num_bytes
        self.num_bytes += stored.num_bytes
        self._by_age[tenant, response_id] = self._clock() + settings.limits.max_stored_response_age_s
        while len(held.responses) > settings.limits.max_stored_responses_per_tenant or held.num_bytes > most_of_tenant:
            self._drop(tenant, next(iter(held.responses)))
        while self.num_bytes > settings.limits.max_stored_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._drop(largest, next(iter(self._tenants[largest].responses)))

    async def delete(self, tenant: str, response_id: str) -> bool:
        found = await self.get(tenant, response_id) is not None
        if found:
            self._drop(tenant, response_id)
        return found

    async def close(self) -> None:
        """Nothing is open."""

    def _expire(self) -> None:
        now = self._clock()
        while self._by_age and next(iter(self._by_age.values())) <= now:
            self._drop(*next(iter(self._by_age)))

    def _drop(self, tenant: str, response_id: str) -> None:
        held = self._tenants[tenant]
        num_bytes = held.responses.pop(response_id).num_bytes
        held.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        del self._by_age[tenant, response_id]
        if not held.responses:
            del self._tenants[tenant]


class _Tenant:
    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        """Responses by id, the oldest first."""
        self.num_bytes = 0
