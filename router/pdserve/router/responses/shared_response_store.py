"""`SharedResponseStore`: stored responses of several router processes, which their parent keeps in its memory."""

from __future__ import annotations

import logging

import msgspec

from pdserve.common.errors import PdServeError, PeerError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.process_link import Handler, ProcessLink
from pdserve.router.responses.response_store import MemoryResponseStore, StoredResponse, is_stored

log = logging.getLogger(__name__)

GET, PUT, DELETE = "responses.get", "responses.put", "responses.delete"
PUT_S = 30.0
"""Seconds for which the end of a response waits until it is stored."""


class _Name(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    response_id: str


class _Put(msgspec.Struct, array_like=True, frozen=True):
    tenant: str
    response_id: str
    stored: StoredResponse


class SharedResponseStore:
    """Used in a router process; the limits are those of the parent's store."""

    def __init__(self, link: ProcessLink, settings: RouterSettings) -> None:
        self._link = link
        self._settings = settings

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        try:
            return await self._link.call(GET, _Name(tenant, response_id), StoredResponse | None)  # type: ignore[arg-type]  # a union is no class
        except PdServeError:
            raise _unreachable() from None

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        if not is_stored(stored, self._settings):
            return
        try:
            await self._link.call(PUT, _Put(tenant, response_id, stored), type(None), PUT_S)
        except PdServeError as error:
            log.warning("response %s is not stored: %s", response_id, error.message)

    async def delete(self, tenant: str, response_id: str) -> bool:
        try:
            return await self._link.call(DELETE, _Name(tenant, response_id), bool)
        except PdServeError:
            raise _unreachable() from None

    async def close(self) -> None:
        """Nothing is open."""


def _unreachable() -> PeerError:
    return PeerError("the store of responses cannot be reached; try again later").for_clients()


def store_handlers(store: MemoryResponseStore) -> dict[str, Handler]:
    """Serve a store to the router processes of this parent."""

    async def get(name: _Name) -> StoredResponse | None:
        return await store.get(name.tenant, name.response_id)

    async def put(asked: _Put) -> None:
        await store.put(asked.tenant, asked.response_id, asked.stored)

    async def delete(name: _Name) -> bool:
        return await store.delete(name.tenant, name.response_id)

    return {GET: Handler(_Name, get), PUT: Handler(_Put, put), DELETE: Handler(_Name, delete)}
