"""`BlockSource`: a worker whose prefix cache has blocks of a prompt."""

from __future__ import annotations

import msgspec


class BlockSource(msgspec.Struct, frozen=True, array_like=True):
    """One epoch of a worker of either role, from which another one reads blocks by hash before it computes the rest."""

    worker_id: str
    epoch: int
    address: str
    """`host:port` of its `KvSourceService`."""
    limit_s: float
    """Seconds after which the reader computes what has not come."""
